"""Whitening of advantages (spec 1.3). Not selectable in the trainer's options yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and unbiased variance of the active tokens."""

    mean: float
    variance: float


def masked_moments(values_M: torch.Tensor, mask_M: torch.Tensor) -> Moments:
    """Statistics over the active tokens of the whole step, all ranks together. Raises ValueError without any."""
    active_n = values_M[mask_M].double()
    if not len(active_n):
        raise ValueError("no active token to whiten by: leave whitening out of a step without any")
    return Moments(float(active_n.mean()), float(active_n.var(unbiased=len(active_n) > 1)))


def whiten(values_M: torch.Tensor, moments: Moments, *, shift_mean: bool = True, epsilon: float = 1e-8) -> torch.Tensor:
    """(v - mean) / sqrt(variance + epsilon) at every position; without `shift_mean` the mean is added back."""
    scaled_M = (values_M - moments.mean) / math.sqrt(moments.variance + epsilon)
    return scaled_M if shift_mean else scaled_M + moments.mean
