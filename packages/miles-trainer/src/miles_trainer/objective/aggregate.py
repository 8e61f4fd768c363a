"""How token terms become one number (spec 1.7): weights known for the whole step before it is cut into micro-batches.

The loss of a step is Σ over its tokens of weight·term. Engines only sum, so packing, micro-batches and ranks cannot
change it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from miles_trainer.objective.ragged import active_counts

Aggregation = Literal["sample_mean", "token_mean", "constant"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """`per_sample` float64 [S] divides a sample's tokens; `batch` divides the sum."""

    per_sample: torch.Tensor
    batch: float


def step_denominators(
    mask_M: torch.Tensor,
    sample_index_M: torch.Tensor,
    rollout_ids: Sequence[Hashable],
    aggregation: Aggregation,
    *,
    constant: float | None = None,
) -> Denominators:
    """Denominators of a step of S samples.

    sample_mean: the samples of one rollout share its active tokens (at least 1), and the sum is divided by the number
    of rollouts; a fully masked one adds 0 and counts. token_mean: 1, and the active tokens of the step (at least 1).
    constant: `constant` tokens a rollout, and the number of rollouts (Dr. GRPO).
    """
    counts_S = active_counts(mask_M, sample_index_M, len(rollout_ids), torch.float64)
    n_rollouts = max(len(set(rollout_ids)), 1)
    if aggregation == "token_mean":
        return Denominators(torch.ones_like(counts_S), max(float(counts_S.sum()), 1.0))
    if aggregation == "constant":
        if constant is None:
            raise ValueError("aggregation 'constant' needs the number of tokens a rollout counts as")
        return Denominators(torch.full_like(counts_S, constant), float(n_rollouts))
    totals: dict[Hashable, float] = {}
    for rollout_id, count in zip(rollout_ids, counts_S.tolist(), strict=True):
        totals[rollout_id] = totals.get(rollout_id, 0.0) + count
    shared = [max(totals[rollout_id], 1.0) for rollout_id in rollout_ids]
    return Denominators(torch.tensor(shared, dtype=torch.float64), float(n_rollouts))


def token_weights(mask_M: torch.Tensor, sample_index_M: torch.Tensor, denominators: Denominators) -> torch.Tensor:
    """w_t = m_t / (denominator · batch), float64 [M]."""
    return mask_M.double() / (denominators.per_sample[sample_index_M] * denominators.batch)
