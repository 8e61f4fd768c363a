"""How far the trainer's log-probabilities are from the rollout's (spec 2). Plain numbers; log-probabilities in nats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_trainer.objective.kl import RESULT_BOUND
from miles_trainer.objective.ragged import masked_mean_by_sample, sum_by_sample, zero_where_inactive


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Means over tokens or over samples with active tokens, as the names say."""

    abs_diff_token_mean: float
    abs_diff_sample_mean: float
    abs_diff_max: float
    k1_token_mean: float
    k3_token_mean: float
    k3_sample_mean: float
    trainer_perplexity: float
    rollout_perplexity: float
    log_perplexity_diff: float
    log_perplexity_abs_diff: float
    perplexity_ratio: float
    chi2_token: float
    chi2_sequence: float
    ratio_min: float
    ratio_max: float


def effective_sample_size(
    ratio_M: torch.Tensor, mask_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int
) -> torch.Tensor:
    """(Σw)² / (n Σw²) over the active tokens of each sample, [S]; 1 = on-policy, 0 = no active token."""
    weight_M = zero_where_inactive(ratio_M.double(), mask_M)
    counts_S = sum_by_sample(mask_M.double(), sample_index_M, n_samples)
    squares_S = sum_by_sample(weight_M.square(), sample_index_M, n_samples)
    return sum_by_sample(weight_M, sample_index_M, n_samples).square() / (counts_S * squares_S).clamp(min=1e-300)


def mismatch(
    trainer_M: torch.Tensor, rollout_M: torch.Tensor, mask_M: torch.Tensor, sample_index_M: torch.Tensor, n_samples: int
) -> Mismatch:
    """Compare two scores of the same tokens. Raises ValueError when no token is active."""
    if not bool(mask_M.any()):
        raise ValueError("no active token to compare: leave the metrics out instead")
    trainer_M, rollout_M = (zero_where_inactive(x.double(), mask_M) for x in (trainer_M, rollout_M))
    kept_S = sum_by_sample(mask_M.double(), sample_index_M, n_samples) > 0
    gap_M = trainer_M - rollout_M
    k3_M = gap_M.exp() - 1 - gap_M

    def over_tokens(values_M: torch.Tensor) -> float:
        return float(values_M[mask_M].mean())

    def per_sample(values_M: torch.Tensor) -> torch.Tensor:
        return masked_mean_by_sample(values_M, mask_M, sample_index_M, n_samples)[kept_S]

    log_ppl_trainer_S, log_ppl_rollout_S = -per_sample(trainer_M), -per_sample(rollout_M)
    difference_S = log_ppl_trainer_S - log_ppl_rollout_S
    sums_S = sum_by_sample(gap_M, sample_index_M, n_samples)[kept_S]
    ratio_M = gap_M.exp()[mask_M]
    return Mismatch(
        abs_diff_token_mean=over_tokens(gap_M.abs()),
        abs_diff_sample_mean=float(per_sample(gap_M.abs()).mean()),
        abs_diff_max=float(gap_M.abs().max()),
        k1_token_mean=over_tokens(-gap_M),
        k3_token_mean=over_tokens(k3_M),
        k3_sample_mean=float(per_sample(k3_M.clamp(-RESULT_BOUND, RESULT_BOUND)).mean()),
        trainer_perplexity=float(log_ppl_trainer_S.exp().mean()),
        rollout_perplexity=float(log_ppl_rollout_S.exp().mean()),
        log_perplexity_diff=float(difference_S.mean()),
        log_perplexity_abs_diff=float(difference_S.abs().mean()),
        perplexity_ratio=float(difference_S.exp().mean()),
        chi2_token=float(ratio_M.square().mean() - 1),
        chi2_sequence=float((2 * sums_S).exp().mean() - 1),
        ratio_min=float(ratio_M.min()),
        ratio_max=float(ratio_M.max()),
    )
