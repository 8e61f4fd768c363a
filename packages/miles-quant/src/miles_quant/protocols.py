"""What the parts of miles-quant, and those who use it, agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

NonFinite = Literal["error", "propagate"]
"""What an input with NaN or an infinity does: raise, or (for debugging only) pass through the arithmetic."""


class Format(Protocol):
    """A number format: how a tensor becomes stored tensors, and how they become numbers again."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Name suffixes of the stored tensors."""
        ...

    def encode(self, x: torch.Tensor, *, name: str, nonfinite: NonFinite) -> dict[str, torch.Tensor]:
        """Suffix to stored tensor. `name` is for error messages."""
        ...

    def decode(self, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that the stored tensors stand for, computed in float32 and rounded once to `dtype`."""
        ...


class WireTensor(Protocol):
    """A tensor as bytes: safetensors dtype name, shape, row-major little-endian data."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> memoryview: ...
