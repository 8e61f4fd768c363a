"""What a step reports. Metrics are functions of the whole step's arrays, so every rank and every packing computes the
same.

Shapes: M trained tokens of the step, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_trainer.objective.mismatch import effective_sample_size, mismatch
from miles_trainer.objective.ragged import masked_mean_by_sample
from miles_trainer.sample import Sample
from miles_trainer.step_batch import RolloutAdvantages, StepBatch
from miles_trainer.versions import UNKNOWN_VERSION


@dataclass(frozen=True, slots=True)
class StepReport:
    """Outcome of `Trainer.train`.

    `version` is that of the weights now. `skipped_steps` counts optimizer steps of this call that changed nothing.
    Metrics that are not finite numbers (of a skipped step) are left out. `rollout_ids` and `group_ids` are all that
    entered, `no_spread` the groups whose rewards were equal.
    """

    step: int
    version: int
    metrics: Mapping[str, float]
    rollout_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    no_spread: tuple[str, ...]
    trained_tokens: int
    skipped_steps: int


@dataclass(frozen=True, slots=True)
class UpdateArrays:
    """Results of one optimizer step, float64 [M] each: log-probability, entropy, corrected policy term, KL term, clip
    indicator.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor


def objective_metrics(
    step: StepBatch, old_M: torch.Tensor, update: UpdateArrays, kl_coef: float, entropy_coef: float
) -> dict[str, float]:
    """`train/*` of one update. Losses use the step's weights; fractions and differences are means over tokens."""

    def reduced(values_M: torch.Tensor) -> float:
        return float((values_M * step.weights).sum())

    policy, entropy, kl = reduced(update.policy), reduced(update.entropy), reduced(update.kl)
    log_ratio_M = update.logprobs - old_M
    ratio_M = log_ratio_M.clamp(-20, 20).exp()
    active_M = torch.ones_like(step.usable)
    ess_S = effective_sample_size(ratio_M, active_M, step.sample_index, len(step.samples))
    metrics = {
        "train/loss": policy - entropy_coef * entropy + kl_coef * kl,
        "train/pg_loss": policy,
        "train/entropy_loss": entropy,
        "train/pg_clipfrac": float(update.clipped.mean()),
        "train/ppo_kl": float(-log_ratio_M.mean()),
        "train/ois": float(ratio_M.mean()),
        "train/ratio_min": float(ratio_M.min()),
        "train/ratio_max": float(ratio_M.max()),
        "train/ess_ratio": float(ess_S.mean()),
    }
    return metrics | ({"train/kl_loss": kl} if kl_coef else {})


def mismatch_metrics(step: StepBatch, old_M: torch.Tensor, current_version: int) -> dict[str, float]:
    """Trainer's score against the rollout's, all tokens under `train/*`, those of the current version under
    `logprob_diff/*`.

    Older tokens are under `stale_logprob_diff/*`. Tokens whose rollout log-probability is not a number are counted
    only.
    """
    gap_M = (old_M - step.rollout_logprobs.double()).abs()
    fresh_M = step.usable & (step.versions == current_version)
    stale_M = step.usable & (step.versions != current_version) & (step.versions != UNKNOWN_VERSION)
    metrics = {
        "train/nonfinite_rollout_logprobs": float((~step.usable).sum()),
        "train/unversioned_tokens": float((step.versions == UNKNOWN_VERSION).sum()),
        "train/stale_tokens": float(stale_M.sum()),
    }
    metrics |= _gap("logprob_diff", gap_M[fresh_M]) | _gap("stale_logprob_diff", gap_M[stale_M])
    if not bool(step.usable.any()):
        return metrics
    found = mismatch(old_M, step.rollout_logprobs, step.usable, step.sample_index, len(step.samples))
    return metrics | {
        "train/train_rollout_logprob_abs_diff": found.abs_diff_sample_mean,
        "train/train_rollout_kl": found.k3_sample_mean,
        "train/mis_training_ppl": found.trainer_perplexity,
        "train/mis_rollout_ppl": found.rollout_perplexity,
        "train/mis_ppl_ratio": found.perplexity_ratio,
        "train/mis_kl": found.k1_token_mean,
        "train/mis_k3_kl": found.k3_token_mean,
        "train/mis_chi2_token": found.chi2_token,
        "train/mis_chi2_seq": found.chi2_sequence,
    }


def _gap(prefix: str, gap_M: torch.Tensor) -> dict[str, float]:
    return {f"{prefix}/mean": float(gap_M.mean()), f"{prefix}/max": float(gap_M.max())} if len(gap_M) else {}


def correction_metrics(weight_M: torch.Tensor, ratio_M: torch.Tensor, bounded_M: torch.Tensor) -> dict[str, float]:
    """`train/tis*` over the tokens before any rejection."""
    return {
        "train/tis": float(weight_M.double().mean()),
        "train/tis_abs": float((ratio_M.double() - 1).abs().mean()),
        "train/tis_clipfrac": float(bounded_M.double().mean()),
    }


def rollout_metrics(samples: Sequence[Sample], advantages: RolloutAdvantages) -> dict[str, float]:
    """`rollout/*` and group counts over everything that entered the step."""
    rewards = {sample.rollout_id: sample.reward for sample in samples}
    responses = [int(np.sum(sample.loss_mask)) for sample in samples]
    return {
        "rollout/raw_reward": float(np.mean(list(rewards.values()))),
        "rollout/advantages": float(np.mean(list(advantages.by_rollout.values()))),
        "rollout/response_lengths": float(np.mean(responses)),
        "rollout/total_lengths": float(np.mean([len(sample.token_ids) for sample in samples])),
        "rollout/samples": float(len(samples)),
        "groups/total": float(len(advantages.group_ids)),
        "groups/no_spread": float(len(advantages.no_spread)),
    }


def score_metrics(step: StepBatch, old_M: torch.Tensor, reference_M: torch.Tensor | None) -> dict[str, float]:
    """`rollout/*log_probs`: means over each sample's trained tokens, then over samples."""

    def mean(values_M: torch.Tensor, mask_M: torch.Tensor) -> float:
        return float(masked_mean_by_sample(values_M.double(), mask_M, step.sample_index, len(step.samples)).mean())

    every_M = torch.ones_like(step.usable)
    metrics = {
        "rollout/log_probs": mean(old_M, every_M),
        "rollout/rollout_log_probs": mean(step.rollout_logprobs, step.usable),
    }
    return metrics | ({} if reference_M is None else {"rollout/ref_log_probs": mean(reference_M, every_M)})
