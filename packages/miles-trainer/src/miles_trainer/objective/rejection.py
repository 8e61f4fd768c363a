"""Importance weights at token or sequence level with rejection of tokens and sequences (spec 2), without gradient.

Not selectable in the trainer's options yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from miles_trainer.objective.corrections import importance_ratio
from miles_trainer.objective.policy_loss import LOG_RATIO_BOUND, log_ratio
from miles_trainer.objective.ragged import masked_mean_by_sample, sum_by_sample, zero_where_inactive

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


@dataclass(frozen=True, slots=True)
class RejectionOptions:
    """How weights are bounded and what is rejected.

    `level`: the ratio of the token, the product over its sequence, or the product's geometric mean. `mode`: at most
    `high`; within [low, high]; or kept, and tokens outside leave the mask. `reject`: (level, low, high) outside which
    tokens leave the mask. `veto`: a sequence with an active token ratio below it is dropped. `normalize`: divide by the
    mean weight.
    """

    level: Level
    mode: Mode
    low: float
    high: float
    reject: tuple[Level, float, float] | None = None
    veto: float | None = None
    normalize: bool = False


@dataclass(frozen=True, slots=True)
class Rejection:
    """`weights` [M], 0 at inactive tokens; `mask` bool [M] after rejection; the mean weight that was divided by."""

    weights: torch.Tensor
    mask: torch.Tensor
    mean_weight: float


def rejected_importance(
    trainer_M: torch.Tensor,
    rollout_M: torch.Tensor,
    mask_M: torch.Tensor,
    sample_index_M: torch.Tensor,
    n_samples: int,
    options: RejectionOptions,
) -> Rejection:
    """Weights and the mask that is left. The mean weight is taken over the active tokens given, before rejection."""
    change_M = log_ratio(trainer_M.detach(), rollout_M.detach(), mask_M)

    def level_ratio(level: Level) -> torch.Tensor:
        return _level_log_ratio(change_M, mask_M, sample_index_M, n_samples, level).exp()

    weights_M, kept_M = _bounded(level_ratio(options.level), mask_M, options)
    weights_M = zero_where_inactive(weights_M, mask_M)
    if options.reject is not None:
        level, low, high = options.reject
        ratio_M = level_ratio(level)
        kept_M = kept_M & (ratio_M >= low) & (ratio_M <= high)
    if options.veto is not None:
        below_M = mask_M & (importance_ratio(trainer_M, rollout_M, mask_M) < options.veto)
        kept_M = kept_M & (sum_by_sample(below_M.double(), sample_index_M, n_samples) == 0)[sample_index_M]
    mean = _mean_weight(weights_M, mask_M, sample_index_M, n_samples, options)
    return Rejection(weights_M / mean, kept_M, mean)


def _level_log_ratio(
    change_M: torch.Tensor, mask_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int, level: Level
) -> torch.Tensor:
    if level == "token":
        return change_M
    if level == "geometric":
        return masked_mean_by_sample(change_M, mask_M, sample_index_M, n_samples)[sample_index_M]
    total_S = sum_by_sample(zero_where_inactive(change_M, mask_M), sample_index_M, n_samples)
    return total_S.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[sample_index_M]


def _bounded(
    ratio_M: torch.Tensor, mask_M: torch.Tensor, options: RejectionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    if options.mode == "truncate":
        return ratio_M.clamp(max=options.high), mask_M
    if options.mode == "clip":
        return ratio_M.clamp(options.low, options.high), mask_M
    return ratio_M, mask_M & (ratio_M >= options.low) & (ratio_M <= options.high)


def _mean_weight(
    weights_M: torch.Tensor,
    mask_M: torch.Tensor,
    sample_index_M: torch.Tensor,
    n_samples: int,
    options: RejectionOptions,
) -> float:
    """Over tokens, or over sequences where the weight is one a sequence; 1 when not asked for or nearly 0."""
    if not options.normalize or not bool(mask_M.any()):
        return 1.0
    if options.level == "token":
        mean = float(weights_M[mask_M].mean())
    else:
        kept_S = sum_by_sample(mask_M.double(), sample_index_M, n_samples) > 0
        mean = float(masked_mean_by_sample(weights_M, mask_M, sample_index_M, n_samples)[kept_S].mean())
    return mean if mean > 1e-8 else 1.0


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """`sequence_kl` [S]: masked mean of old - new; `keep` bool [M]."""

    sequence_kl: torch.Tensor
    keep: torch.Tensor


def off_policy_mask(
    new_M: torch.Tensor,
    old_M: torch.Tensor,
    advantages_S: torch.Tensor,
    mask_M: torch.Tensor,
    sample_index_M: torch.Tensor,
    *,
    delta: float,
) -> OffPolicyMask:
    """OPSM: sequences with a negative advantage that drifted by more than `delta` nats a token are dropped."""
    gap_M = zero_where_inactive(old_M.detach(), mask_M) - zero_where_inactive(new_M.detach(), mask_M)
    kl_S = masked_mean_by_sample(gap_M, mask_M, sample_index_M, len(advantages_S))
    dropped_S = (advantages_S < 0) & (kl_S > delta)
    return OffPolicyMask(kl_S, ~dropped_S[sample_index_M])
