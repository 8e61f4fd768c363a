"""The terms of the loss per token, and their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_trainer.objective.corrections import Correction, importance_ratio, truncated_importance
from miles_trainer.objective.kl import KlEstimator, kl_estimate
from miles_trainer.objective.policy_loss import PolicyLoss, clipped_policy_loss, log_ratio, sequence_log_ratio
from miles_trainer.objective.ragged import zero_where_inactive


@dataclass(frozen=True, slots=True)
class TermOptions:
    """What the token terms depend on. `tis` is (low, high) or None; `sequence_ratio`: one ratio a sequence (GSPO)."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    tis: tuple[float, float] | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "low_var"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    sequence_ratio: bool = False


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Flat arrays of M tokens. Inactive ones may hold NaN anywhere. Log-probabilities in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    sample_index: torch.Tensor
    n_samples: int


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Terms of [M] tokens: `policy` (corrected), `entropy`, `kl` (None without reference), and how they came about."""

    policy: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor | None
    loss: PolicyLoss
    correction: Correction | None


def token_terms(inputs: TokenInputs, options: TermOptions) -> TokenTerms:
    """Policy, entropy and KL term of each token; exact 0 at inactive ones."""
    mask_M = inputs.mask
    change_M = log_ratio(inputs.logprobs, inputs.old, mask_M)
    if options.sequence_ratio:
        change_M = sequence_log_ratio(change_M, mask_M, inputs.sample_index, inputs.n_samples)
    loss = clipped_policy_loss(
        change_M,
        zero_where_inactive(inputs.advantages, mask_M),
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    correction = _correction(inputs, options)
    policy_M = loss.loss if correction is None else loss.loss * correction.weight
    return TokenTerms(
        policy=zero_where_inactive(policy_M, mask_M),
        entropy=zero_where_inactive(inputs.entropy, mask_M),
        kl=_kl(inputs, options),
        loss=loss,
        correction=correction,
    )


def _correction(inputs: TokenInputs, options: TermOptions) -> Correction | None:
    if options.tis is None:
        return None
    low, high = options.tis
    return truncated_importance(importance_ratio(inputs.old, inputs.rollout, inputs.mask), low=low, high=high)


def _kl(inputs: TokenInputs, options: TermOptions) -> torch.Tensor | None:
    if inputs.reference is None:
        return None
    mask_M = inputs.mask
    old_M = zero_where_inactive(inputs.old, mask_M) if options.kl_unbiased else None
    value_M = kl_estimate(
        zero_where_inactive(inputs.logprobs, mask_M),
        zero_where_inactive(inputs.reference, mask_M),
        options.kl_estimator,
        importance_old_M=old_M,
    )
    return zero_where_inactive(value_M, mask_M)


def total_loss(terms: TokenTerms, weights_M: torch.Tensor, options: TermOptions) -> torch.Tensor:
    """Σ w·(policy - entropy_coef·H + kl_coef·KL), a scalar."""
    total_M = terms.policy
    if options.entropy_coef:
        total_M = total_M - options.entropy_coef * terms.entropy
    if options.kl_coef and terms.kl is not None:
        total_M = total_M + options.kl_coef * terms.kl
    return (total_M * weights_M).sum()


def supervised_loss(logprobs_M: torch.Tensor, weights_M: torch.Tensor) -> torch.Tensor:
    """-Σ w·log π, a scalar; with token-mean weights the mean negative log-likelihood, at T = 1."""
    return -(logprobs_M * weights_M).sum()
