"""The samples of one step as flat arrays of trained tokens, with weights fixed before anything is cut into
micro-batches.

Shapes: S samples, M trained tokens of the step in sample order, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from miles_trainer.config import ObjectiveConfig
from miles_trainer.errors import GroupError, SampleError
from miles_trainer.objective.advantages import group_members, grpo_advantages, has_spread
from miles_trainer.objective.aggregate import step_denominators, token_weights
from miles_trainer.objective.ragged import sample_index
from miles_trainer.sample import Sample
from miles_trainer.versions import token_versions


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the step computes on. Tensors are [M] on the CPU; `offsets` [S+1] are the trained tokens of each sample.

    `targets` int64 token ids; `positions` int64 index of the token in its sample (its prediction is made one earlier);
    `rollout_logprobs` float32 nats, 0 where `usable` is False; `usable` bool: the rollout's log-probability is a finite
    number; `advantages` float32; `weights` float64; `temperatures` float32; `versions` int64, -1 unknown.
    """

    samples: tuple[Sample, ...]
    offsets: tuple[int, ...]
    sample_index: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    rollout_logprobs: torch.Tensor
    usable: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor
    versions: torch.Tensor

    @property
    def n_tokens(self) -> int:
        return self.offsets[-1]

    def rows(self, members: Sequence[int]) -> torch.Tensor:
        """Indices of the trained tokens of some samples, in the order of `members`, int64."""
        spans = [torch.arange(self.offsets[i], self.offsets[i + 1]) for i in members]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class RolloutAdvantages:
    """Advantage of each rollout, and the ids of groups whose rewards are all equal."""

    by_rollout: dict[str, float]
    group_ids: tuple[str, ...]
    no_spread: tuple[str, ...]


def check_sample(sample: Sample, vocab_size: int) -> None:
    """Raise SampleError when arrays contradict each other or the vocabulary."""
    n_tokens = len(sample.token_ids)
    name = f"rollout {sample.rollout_id}"
    if not sample.group_id or not sample.rollout_id:
        raise SampleError("a sample has no group id or no rollout id: advantages need both")
    if n_tokens < 1 or len(sample.loss_mask) != n_tokens or len(sample.logprobs) != n_tokens:
        raise SampleError(
            f"{name}: {n_tokens} tokens, {len(sample.loss_mask)} mask values, {len(sample.logprobs)} "
            "log-probabilities; "
            "they must be equally many and at least one"
        )
    if not np.isin(sample.loss_mask, (0, 1)).all() or sample.loss_mask[0]:
        raise SampleError(f"{name}: the loss mask holds 0 and 1 and starts with 0: the first token has no prediction")
    lowest, highest = int(np.min(sample.token_ids)), int(np.max(sample.token_ids))
    if lowest < 0 or highest >= vocab_size:
        raise SampleError(f"{name}: token ids {lowest} … {highest} do not fit a vocabulary of {vocab_size}")
    if not sample.temperature > 0:
        raise SampleError(f"{name}: temperature {sample.temperature} is not above 0; greedy rollouts say 1.0")


def rollout_advantages(samples: Sequence[Sample], objective: ObjectiveConfig) -> RolloutAdvantages:
    """Group-relative advantages, one a rollout. Raises GroupError when a rollout's samples disagree."""
    first: dict[str, Sample] = {}
    for sample in samples:
        known = first.setdefault(sample.rollout_id, sample)
        if known.group_id != sample.group_id or known.reward != sample.reward:
            raise GroupError(
                f"rollout {sample.rollout_id}: groups {known.group_id} and {sample.group_id}, rewards {known.reward} "
                "and "
                f"{sample.reward}; the samples of one rollout share both"
            )
    rewards = [sample.reward for sample in first.values()]
    groups = [sample.group_id for sample in first.values()]
    values = grpo_advantages(rewards, groups, normalize_std=objective.normalize_std)
    spread = {str(g): has_spread(np.asarray(rewards)[i]) for g, i in group_members(groups).items()}
    return RolloutAdvantages(
        by_rollout=dict(zip(first, values.tolist(), strict=True)),
        group_ids=tuple(spread),
        no_spread=tuple(group for group, differs in spread.items() if not differs),
    )


def build_step(
    samples: Sequence[Sample],
    advantages: dict[str, float],
    objective: ObjectiveConfig,
    *,
    skip_groups: Sequence[str] = (),
) -> StepBatch:
    """Weights come from all samples; those of `skip_groups` are then left out of the computation."""
    masks = [np.asarray(sample.loss_mask) > 0 for sample in samples]
    counts = [int(mask.sum()) for mask in masks]
    index_M = sample_index(counts)
    denominators = step_denominators(
        torch.ones(len(index_M), dtype=torch.bool),
        index_M,
        [sample.rollout_id for sample in samples],
        objective.aggregation,
        constant=objective.constant_divisor,
    )
    weights_M = token_weights(torch.ones(len(index_M), dtype=torch.bool), index_M, denominators)
    kept = [i for i, sample in enumerate(samples) if sample.group_id not in skip_groups and counts[i]]
    starts = np.concatenate([[0], np.cumsum(counts)])
    weights = [weights_M[starts[i] : starts[i + 1]] for i in kept]
    return _flatten([samples[i] for i in kept], weights, [advantages[samples[i].rollout_id] for i in kept])


def build_supervised_step(samples: Sequence[Sample]) -> StepBatch:
    """Token-mean weights on the mask, temperature 1; rewards and versions play no part."""
    kept = [replace(sample, temperature=1.0) for sample in samples if np.any(sample.loss_mask)]
    counts = [int(np.sum(sample.loss_mask)) for sample in kept]
    weight = 1.0 / max(sum(counts), 1)
    return _flatten(kept, [torch.full((n,), weight, dtype=torch.float64) for n in counts], [0.0] * len(kept))


def build_scoring_step(samples: Sequence[Sample]) -> StepBatch:
    """Positions and targets of every sample, without weights."""
    counts = [int(np.sum(sample.loss_mask)) for sample in samples]
    return _flatten(list(samples), [torch.zeros(n, dtype=torch.float64) for n in counts], [0.0] * len(samples))


def _flatten(samples: Sequence[Sample], weights: Sequence[torch.Tensor], advantages: Sequence[float]) -> StepBatch:
    positions = [np.flatnonzero(sample.loss_mask) for sample in samples]
    counts = [len(position) for position in positions]
    logprobs_M = _join(
        [np.asarray(s.logprobs, np.float32)[p] for s, p in zip(samples, positions, strict=True)], np.float32
    )
    usable_M = np.isfinite(logprobs_M)
    return StepBatch(
        samples=tuple(samples),
        offsets=tuple(int(x) for x in np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])),
        sample_index=sample_index(counts),
        targets=_tensor([np.asarray(s.token_ids)[p] for s, p in zip(samples, positions, strict=True)], np.int64),
        positions=_tensor(positions, np.int64),
        rollout_logprobs=torch.from_numpy(np.where(usable_M, logprobs_M, np.float32(0))),
        usable=torch.from_numpy(usable_M),
        advantages=_spread(advantages, counts),
        weights=torch.cat(list(weights)) if weights else torch.zeros(0, dtype=torch.float64),
        temperatures=_spread([s.temperature for s in samples], counts),
        versions=_tensor([token_versions(s)[p] for s, p in zip(samples, positions, strict=True)], np.int64),
    )


def _spread(values: Sequence[float], counts: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), counts))


def _join(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)


def _tensor(parts: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
    return torch.from_numpy(_join(parts, dtype))
