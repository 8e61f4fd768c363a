"""Other policy losses of the literature (spec 1.5). Not selectable in the trainer's options yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_trainer.objective.policy_loss import PolicyLoss
from miles_trainer.objective.ragged import masked_mean_by_sample, zero_where_inactive


def detached_clip_loss(
    logprobs_M: torch.Tensor,
    log_ratio_M: torch.Tensor,
    advantages_M: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO: -sg[clip(r, 1 - low, 1 + high)]·A·log π; clipping bounds the weight and keeps the gradient."""
    ratio_M = log_ratio_M.detach().exp()
    bounded_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-bounded_M * advantages_M * logprobs_M, ratio_M, bounded_M != ratio_M)


def soft_gate_loss(
    log_ratio_M: torch.Tensor, advantages_M: torch.Tensor, *, tau_positive: float, tau_negative: float
) -> torch.Tensor:
    """SAPO: -(4/τ)·sigmoid(τ(r - 1))·A with τ by the sign of A, [M]."""
    tau_M = log_ratio_M.new_tensor([tau_negative, tau_positive])[(advantages_M > 0).long()]
    return -4 / tau_M * torch.sigmoid(tau_M * (log_ratio_M.exp() - 1)) * advantages_M


def geometric_mean_loss(
    log_ratio_M: torch.Tensor,
    advantages_S: torch.Tensor,
    mask_M: torch.Tensor,
    sample_index_M: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """GMPO: -A·exp(mean of the bounded log-ratio), one value a sequence, [S].

    Bounds apply to the log-ratio on the side that would inflate the gain, by the sign of A.
    """
    sign_M = torch.where(advantages_S > 0, 1.0, -1.0).to(log_ratio_M.dtype)[sample_index_M]
    signed_M = sign_M * log_ratio_M
    bounded_M = sign_M * torch.minimum(signed_M, signed_M.clamp(-clip_low, clip_high))
    mean_S = masked_mean_by_sample(bounded_M, mask_M, sample_index_M, len(advantages_S))
    return -advantages_S * mean_S.exp()


@dataclass(frozen=True, slots=True)
class TotalVariationLoss:
    """`loss` [M] with gradient; `dropped` [M] bool: the policy term was left out."""

    loss: torch.Tensor
    dropped: torch.Tensor


def total_variation_loss(
    logprobs_M: torch.Tensor,
    rollout_M: torch.Tensor,
    advantages_M: torch.Tensor,
    mask_M: torch.Tensor,
    *,
    bound_high: float,
    bound_low: float,
    advantage_scale: float = 1.0,
    kl_scale: float = 1e-3,
) -> TotalVariationLoss:
    """DPPO: -A·π/b where the probability has not moved past a bound in the direction of A, plus a squared log-ratio.

    The policy term is dropped when A > 0 and p_π - p_b > high, or A ≤ 0 and p_π - p_b < -low.
    """
    logprobs_M, rollout_M = zero_where_inactive(logprobs_M, mask_M), zero_where_inactive(rollout_M, mask_M)
    moved_M = logprobs_M.detach().exp() - rollout_M.exp()
    dropped_M = torch.where(advantages_M > 0, moved_M > bound_high, moved_M < -bound_low) & mask_M
    change_M = logprobs_M - rollout_M
    gain_M = torch.where(dropped_M, torch.zeros_like(change_M), change_M.exp() * advantages_M)
    loss_M = -advantage_scale * gain_M + kl_scale * change_M.square()
    return TotalVariationLoss(zero_where_inactive(loss_M, mask_M), dropped_M)
