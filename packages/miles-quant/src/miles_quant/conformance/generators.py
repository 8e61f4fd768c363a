"""Inputs that golden files describe by a generator instead of by bytes."""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64_bf16(shape: tuple[int, ...], *, seed: int, exp_lo: int, exp_hi: int) -> torch.Tensor:
    """bfloat16 numbers of `shape`: sign, exponent (exp_lo..exp_hi) and mantissa from one splitmix64 output each."""
    count = int(np.prod(shape))
    counter = np.arange(1, count + 1, dtype=np.uint64)
    z = _splitmix64(np.uint64(seed) + counter * _GOLDEN_GAMMA)
    exponent = np.uint64(exp_lo) + ((z >> np.uint64(32)) & np.uint64(0xFFFF)) % np.uint64(exp_hi - exp_lo + 1)
    bits = ((z >> np.uint64(63)) << np.uint64(15)) | (exponent << np.uint64(7)) | (z & np.uint64(0x7F))
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16).reshape(shape)


def _splitmix64(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    z = (state ^ (state >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
