"""Policy losses per token (spec 1.5). Ratios are plain numbers, log-probabilities in nats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_trainer.objective.ragged import masked_mean_by_sample, zero_where_inactive

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` [M] with gradient, `ratio` [M], and `clipped` [M] bool: the clipped branch was strictly larger."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def log_ratio(new_M: torch.Tensor, old_M: torch.Tensor, mask_M: torch.Tensor | None = None) -> torch.Tensor:
    """log π - log old within ±20; exact 0 at inactive tokens, so that what stood there cannot reach the gradient."""
    if mask_M is not None:
        new_M, old_M = zero_where_inactive(new_M, mask_M), zero_where_inactive(old_M, mask_M)
    return (new_M - old_M).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_policy_loss(
    log_ratio_M: torch.Tensor,
    advantages_M: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO: max(-r·A, -clip(r, 1 - low, 1 + high)·A); with `dual_clip` c, at most -c·A where A < 0."""
    ratio_M = log_ratio_M.exp()
    plain_M = -ratio_M * advantages_M
    clipped_M = -ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M
    loss_M = torch.maximum(plain_M, clipped_M)
    if dual_clip is not None:
        bounded_M = torch.minimum(loss_M, -dual_clip * advantages_M)
        loss_M = torch.where(advantages_M < 0, bounded_M, loss_M)
    return PolicyLoss(loss_M, ratio_M, clipped_M > plain_M)


def sequence_log_ratio(
    log_ratio_M: torch.Tensor, mask_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int
) -> torch.Tensor:
    """GSPO: mean log-ratio of a sequence's active tokens on each of its tokens, [M]; the gradient flows through the
    mean.
    """
    return masked_mean_by_sample(log_ratio_M, mask_M, sample_index_M, n_samples)[sample_index_M]
