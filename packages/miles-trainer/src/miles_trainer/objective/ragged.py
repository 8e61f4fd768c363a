"""Ragged arrays: flat values [M] with the index of their sample [M]; sums and means per sample [S]."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sample_index(lengths: Sequence[int]) -> torch.Tensor:
    """int64 [M]: 0 repeated lengths[0] times, then 1, …"""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths), dtype=torch.int64))


def sum_by_sample(values_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int) -> torch.Tensor:
    """[S]: sum of the values of each sample, differentiable."""
    return values_M.new_zeros(n_samples).index_add(0, sample_index_M, values_M)


def masked_mean_by_sample(
    values_M: torch.Tensor, mask_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int
) -> torch.Tensor:
    """[S]: mean over the active tokens of each sample; 0 where a sample has none. Inactive values may be NaN."""
    sums_S = sum_by_sample(zero_where_inactive(values_M, mask_M), sample_index_M, n_samples)
    return sums_S / active_counts(mask_M, sample_index_M, n_samples, values_M.dtype).clamp(min=1)


def active_counts(
    mask_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int, dtype: torch.dtype
) -> torch.Tensor:
    """[S]: active tokens of each sample, as numbers of `dtype`."""
    return sum_by_sample(mask_M.to(dtype), sample_index_M, n_samples)


def zero_where_inactive(values_M: torch.Tensor, mask_M: torch.Tensor) -> torch.Tensor:
    """Exact 0 at inactive tokens, whatever stood there: NaN times 0 would be NaN, in the gradient too."""
    return torch.where(mask_M, values_M, torch.zeros_like(values_M))
