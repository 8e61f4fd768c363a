"""Corrections for the gap between the rollout's and the trainer's log-probabilities (spec 2). Weights carry no
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_trainer.objective.policy_loss import log_ratio


@dataclass(frozen=True, slots=True)
class Correction:
    """`weight` [M] multiplies the policy loss; `ratio` [M] before bounding; `bounded` [M]: the bound changed it."""

    weight: torch.Tensor
    ratio: torch.Tensor
    bounded: torch.Tensor


def importance_ratio(trainer_M: torch.Tensor, rollout_M: torch.Tensor, mask_M: torch.Tensor) -> torch.Tensor:
    """exp(trainer - rollout) within e^±20, detached; 1 at inactive tokens, which may hold NaN."""
    return log_ratio(trainer_M.detach(), rollout_M.detach(), mask_M).exp()


def truncated_importance(ratio_M: torch.Tensor, *, low: float, high: float) -> Correction:
    """TIS: the ratio held within [low, high]."""
    weight_M = ratio_M.clamp(low, high)
    return Correction(weight_M, ratio_M, weight_M != ratio_M)


def clip_or_pop(ratio_M: torch.Tensor, *, low: float, high: float) -> Correction:
    """IcePop: the ratio inside the closed interval, 0 outside; not renormalised."""
    inside_M = (ratio_M >= low) & (ratio_M <= high)
    return Correction(torch.where(inside_M, ratio_M, torch.zeros_like(ratio_M)), ratio_M, ~inside_M)
