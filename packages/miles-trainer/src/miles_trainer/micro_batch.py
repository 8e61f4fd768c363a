"""Micro-batches of one rank: packed tensors and the rows of the step they compute.

Shapes: N packed tokens, P predictions (positions whose logits are computed), m trained tokens of the micro-batch,
T tokens of a sample, L routed layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from miles_trainer.config import PackingConfig
from miles_trainer.forest import build_forest
from miles_trainer.packing import Bin, PackedForest, Segment, fill_bins, lay_out, level_bins, rank_bins
from miles_trainer.replay.records import HOLE, RoutesRLK
from miles_trainer.step_batch import StepBatch

Integers = TypeVar("Integers", bound=np.integer[Any])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `input_ids`, `positions` int64 [1, N]; `segments` tile the row.

    A prediction is made once for all samples that share its position: `keep` int64 [P] are the packed positions, each
    one before its tokens, and `temperatures` float32 [P] divide their logits. `rows` int64 [m] are the trained tokens
    by their index in the step, `predictions` int64 [m], ascending, which prediction each one reads.

    `routes` int32 [N, L, K] are the recorded experts where routes are replayed; `shares` int64 [N] counts the samples
    that have a token. A micro-batch without trained tokens keeps position 0 and has no rows: its pass runs so that
    ranks stay in step.
    """

    index: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    keep: torch.Tensor
    temperatures: torch.Tensor
    rows: torch.Tensor
    predictions: torch.Tensor
    shares: NDArray[np.int64]
    routes: RoutesRLK | None = None

    @property
    def is_filler(self) -> bool:
        return len(self.rows) == 0

    @property
    def computed_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def shared_tokens(self) -> int:
        """Tokens that other samples of the micro-batch have computed already."""
        return int(self.shares.sum()) - self.computed_tokens


def plan_micro_batches(
    step: StepBatch,
    packing: PackingConfig,
    *,
    routes: Sequence[RoutesRLK] | None = None,
    rank: int = 0,
    n_ranks: int = 1,
) -> list[MicroBatch]:
    """This rank's micro-batches. Every rank gets equally many; each trained token is in exactly one of them.

    Tokens behind the last trained prediction of a sample are not computed. `routes`: int32 [T, L, K] of each sample,
    which then must be equal too where samples share a prefix.
    """
    sequences = [_symbols(step, index, routes) for index in range(len(step.samples))]
    forest = build_forest(sequences, min_shared_tokens=packing.min_shared_tokens if packing.share_prefixes else None)
    mine = rank_bins(level_bins(fill_bins(forest, packing.max_tokens), n_ranks, forest), rank, n_ranks)
    return [_build(step, index, chosen, lay_out(forest, chosen.members), routes) for index, chosen in enumerate(mine)]


def _symbols(step: StepBatch, index: int, routes: Sequence[RoutesRLK] | None) -> NDArray[np.integer]:
    """int32 [T', 1 + L·K]: tokens up to the last prediction that is trained, at least one, with their routes."""
    trained = step.positions[step.offsets[index] : step.offsets[index + 1]]
    needed = max(int(trained[-1]) if len(trained) else 0, 1)
    columns = [np.asarray(step.samples[index].token_ids, np.int32)[:needed, None]]
    if routes is not None:
        columns.append(routes[index][:needed].reshape(needed, -1))
    return np.concatenate(columns, axis=1)


def _build(
    step: StepBatch, index: int, chosen: Bin, packed: PackedForest, routes: Sequence[RoutesRLK] | None
) -> MicroBatch:
    rows = step.rows(() if chosen.filler else chosen.members)
    keep, temperatures, order, predictions = _predictions(step, chosen, packed, rows)
    return MicroBatch(
        index=index,
        input_ids=torch.from_numpy(_tokens(packed, step))[None],
        positions=torch.from_numpy(packed.positions)[None],
        segments=packed.segments,
        keep=keep,
        temperatures=temperatures,
        rows=rows[order],
        predictions=predictions,
        shares=np.zeros_like(packed.shares) if chosen.filler else packed.shares,
        routes=None if routes is None else _routes(packed, routes, follow=not chosen.filler),
    )


def _owned(packed: PackedForest, arrays: Sequence[NDArray[Integers]]) -> NDArray[Integers]:
    """The packed row of per-sample arrays [T, …]: each token from the sample that owns it."""
    row = np.zeros((len(packed.owners), *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for owner in np.unique(packed.owners):
        here = packed.owners == owner
        row[here] = arrays[owner][packed.positions[here]]
    return row


def _tokens(packed: PackedForest, step: StepBatch) -> NDArray[np.int64]:
    return _owned(packed, [np.asarray(sample.token_ids, np.int64) for sample in step.samples])


def _routes(packed: PackedForest, routes: Sequence[RoutesRLK], *, follow: bool) -> RoutesRLK:
    row = _owned(packed, routes)
    return row if follow else np.full_like(row, HOLE)


def _predictions(
    step: StepBatch, chosen: Bin, packed: PackedForest, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`keep` [P], their temperatures [P], the order of `rows` by prediction [m], the prediction of each ordered row
    [m].
    """
    if not len(rows):
        nothing = torch.zeros(0, dtype=torch.int64)
        return torch.zeros(1, dtype=torch.int64), torch.ones(1), nothing, nothing
    before = [
        place[step.positions[step.offsets[i] : step.offsets[i + 1]].numpy() - 1]
        for i, place in zip(chosen.members, packed.places, strict=True)
    ]
    spots = np.stack([np.concatenate(before), step.temperatures[rows].numpy().view(np.int32)], axis=1)
    distinct, prediction = np.unique(spots, axis=0, return_inverse=True)
    prediction = prediction.reshape(-1)
    order = np.argsort(prediction, kind="stable")
    temperatures = distinct[:, 1].astype(np.int32).view(np.float32)
    return (
        torch.from_numpy(distinct[:, 0].copy()),
        torch.from_numpy(temperatures),
        torch.from_numpy(order),
        torch.from_numpy(prediction[order]),
    )
