"""Ragged lists of the golden files as flat float64 tensors, and back. null is NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from miles_trainer.objective.ragged import sample_index

Case = Mapping[str, Any]


def vector(values: Sequence[float | None]) -> torch.Tensor:
    """[M]"""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)


def flat(rows: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """[M], the rows one after another."""
    return vector([value for row in rows for value in row])


def flat_mask(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """bool [M]"""
    return flat(rows) > 0


def index_of(rows: Sequence[Sequence[Any]]) -> torch.Tensor:
    """int64 [M]: the row of each value."""
    return sample_index([len(row) for row in rows])


def ragged(values: torch.Tensor, rows: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Lists as long as `rows`."""
    parts = torch.split(values.detach().double(), [len(row) for row in rows])
    return [part.tolist() for part in parts]


def leaf(values: torch.Tensor) -> torch.Tensor:
    """A copy that gathers gradient."""
    return values.clone().requires_grad_()


def gradient(scalar: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """d scalar / d of."""
    return torch.autograd.grad(scalar, of)[0]
