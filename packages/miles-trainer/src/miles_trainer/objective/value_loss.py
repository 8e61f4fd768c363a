"""The critic's loss (spec 1.4). Not selectable in the trainer's options yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """`loss` [M]; `moved` bool [M]: |v - old| above the bound; `clipped` bool [M]: the clipped error was larger."""

    loss: torch.Tensor
    moved: torch.Tensor
    clipped: torch.Tensor


def clipped_value_loss(
    values_M: torch.Tensor, old_M: torch.Tensor, returns_M: torch.Tensor, *, clip: float, half: bool = False
) -> ValueLoss:
    """max((v - ret)², (old + clamp(v - old, ±clip) - ret)²), times ½ if `half`."""
    bounded_M = old_M + (values_M - old_M).clamp(-clip, clip)
    plain_M, clipped_M = (values_M - returns_M).square(), (bounded_M - returns_M).square()
    loss_M = torch.maximum(plain_M, clipped_M) * (0.5 if half else 1.0)
    return ValueLoss(loss_M, (values_M - old_M).abs() > clip, clipped_M > plain_M)
