"""Micro-batches of one rank: packed tensors and the rows of the step they compute.

Shapes: N packed tokens, M trained tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_trainer.packing import Bin, first_fit_decreasing, level_bins, pack_tokens, rank_bins
from miles_trainer.sample import Sample
from miles_trainer.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `input_ids`, `positions` int64 [1, N]; `bounds` cumulative lengths from 0 to N.

    `keep` int64 [M]: packed positions whose logits are computed, each one before its token; `rows` int64 [M]: where
    their results go in the step. A micro-batch without trained tokens keeps position 0 and has no rows: its pass runs
    so that ranks stay in step.
    """

    index: int
    samples: tuple[Sample, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    bounds: tuple[int, ...]
    keep: torch.Tensor
    rows: torch.Tensor

    @property
    def is_filler(self) -> bool:
        return len(self.rows) == 0


def plan_micro_batches(step: StepBatch, *, max_tokens: int, rank: int, n_ranks: int) -> list[MicroBatch]:
    """This rank's micro-batches. Every rank gets equally many; each trained token is in exactly one of them."""
    bins = first_fit_decreasing([len(sample.token_ids) for sample in step.samples], max_tokens)
    mine = rank_bins(level_bins(bins, n_ranks), rank, n_ranks)
    return [_build(step, index, chosen) for index, chosen in enumerate(mine)]


def _build(step: StepBatch, index: int, chosen: Bin) -> MicroBatch:
    samples = tuple(step.samples[i] for i in chosen.members)
    packed = pack_tokens([sample.token_ids for sample in samples])
    rows = step.rows(() if chosen.filler else chosen.members)
    return MicroBatch(
        index=index,
        samples=samples,
        input_ids=torch.from_numpy(packed.token_ids)[None],
        positions=torch.from_numpy(packed.positions)[None],
        bounds=tuple(packed.bounds.tolist()),
        keep=_kept_positions(step, chosen.members, packed.bounds.tolist())
        if len(rows)
        else torch.zeros(1, dtype=torch.int64),
        rows=rows,
    )


def _kept_positions(step: StepBatch, members: Sequence[int], bounds: Sequence[int]) -> torch.Tensor:
    parts = [
        step.positions[step.offsets[i] : step.offsets[i + 1]].numpy() - 1 + start
        for i, start in zip(members, bounds, strict=False)
    ]
    return torch.from_numpy(np.concatenate(parts))
