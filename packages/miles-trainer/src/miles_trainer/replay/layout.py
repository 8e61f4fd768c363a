"""Cutting dense expert rows along context, tensor and pipeline ranks (spec 4.2). Rows keep step with the packed tokens.

Shapes: T tokens of a sample, L layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from miles_trainer.errors import ReplayError
from miles_trainer.replay.records import HOLE, RoutesRLK


@dataclass(frozen=True, slots=True)
class ReplayLayout:
    """How the rows of a batch are laid out. `pad_multiple`: rows of each tensor rank are a multiple of it."""

    cp_size: int = 1
    cp_layout: Literal["zigzag", "allgather"] = "zigzag"
    tp_size: int = 1
    pad_multiple: int = 1


@dataclass(frozen=True, slots=True)
class ReplayShards:
    """`streams[cp][tp]` [rows, L, K] without holes; `spans[cp][sample]` = [start, end) in the context rank's rows."""

    streams: tuple[tuple[RoutesRLK, ...], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]


def zigzag_chunk(tokens: int, cp_size: int) -> int:
    """Tokens of one of the 2·cp chunks of a padded sequence; with cp = 1 the sequence is one piece, unpadded."""
    return -(-tokens // (2 * cp_size))


def zigzag_positions(tokens: int, cp_size: int, rank: int) -> NDArray[np.int64]:
    """Positions of the padded sequence that `rank` owns: chunks rank and 2·cp - 1 - rank, in order."""
    chunk = zigzag_chunk(tokens, cp_size)
    mirrored = 2 * cp_size - 1 - rank
    return np.concatenate([np.arange(c * chunk, (c + 1) * chunk, dtype=np.int64) for c in (rank, mirrored)])


def shard_rows(samples: Sequence[RoutesRLK], layout: ReplayLayout, *, num_experts: int) -> ReplayShards:
    """Rows of validated samples [T-1, L, K] → streams for each rank, each hole filled with legal experts."""
    full = [_with_rows(rows, len(rows) + 1) for rows in samples]
    if layout.cp_layout == "allgather":
        ranks, spans = _allgather(full, layout)
    else:
        ranks, spans = _zigzag(full, layout)
    streams = tuple(tuple(np.split(fill_holes(rows, num_experts), layout.tp_size)) for rows in ranks)
    return ReplayShards(streams, spans)


def fill_holes(rows: RoutesRLK, num_experts: int) -> RoutesRLK:
    """Each row of -1 becomes 0, 1, … mod experts, so that gathers stay legal."""
    filler = (np.arange(rows.shape[-1]) % num_experts).astype(np.int32)
    return np.where(rows == HOLE, filler, rows)


def _with_rows(rows: RoutesRLK, count: int) -> RoutesRLK:
    missing = np.full((count - len(rows), *rows.shape[1:]), HOLE, dtype=np.int32)
    return np.concatenate([rows, missing])


def _ceil(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _zigzag(
    full: Sequence[RoutesRLK], layout: ReplayLayout
) -> tuple[list[RoutesRLK], tuple[tuple[tuple[int, int], ...], ...]]:
    ranks: list[RoutesRLK] = []
    spans: list[tuple[tuple[int, int], ...]] = []
    for rank in range(layout.cp_size):
        parts = [_zigzag_part(rows, layout.cp_size, rank) for rows in full]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        spans.append(tuple((end - len(part), end) for part, end in zip(parts, ends, strict=True)))
        ranks.append(_with_rows(np.concatenate(parts), _ceil(ends[-1], layout.tp_size * layout.pad_multiple)))
    return ranks, tuple(spans)


def _zigzag_part(rows: RoutesRLK, cp_size: int, rank: int) -> RoutesRLK:
    if cp_size == 1:
        return rows
    padded = _with_rows(rows, 2 * cp_size * zigzag_chunk(len(rows), cp_size))
    return padded[zigzag_positions(len(rows), cp_size, rank)]


def _allgather(
    full: Sequence[RoutesRLK], layout: ReplayLayout
) -> tuple[list[RoutesRLK], tuple[tuple[tuple[int, int], ...], ...]]:
    joined = np.concatenate(full)
    total = _ceil(len(joined), layout.cp_size * layout.tp_size * layout.pad_multiple)
    ranks = np.split(_with_rows(joined, total), layout.cp_size)
    width = total // layout.cp_size
    ends = np.cumsum([len(rows) for rows in full]).tolist()
    edges = [(end - len(rows), end) for rows, end in zip(full, ends, strict=True)]
    return ranks, tuple(tuple(_within(a, b, rank * width, width) for a, b in edges) for rank in range(layout.cp_size))


def _within(start: int, end: int, offset: int, width: int) -> tuple[int, int]:
    a, b = max(start - offset, 0), min(end - offset, width)
    return (a, b) if a < b else (0, 0)


def stage_layers(
    num_layers: int,
    moe_layer_freq: int | Sequence[int],
    *,
    pp: int = 1,
    vp: int = 1,
    pp_rank: int = 0,
    vp_stage: int = 0,
) -> list[int]:
    """Global indices of the routed layers of a pipeline chunk (`vp_stage · pp + pp_rank`, equal chunks).

    `moe_layer_freq` f: layer i is routed when i % f = 0; or a list of 0/1, one a layer. Raises ReplayError `layers`.
    """
    if isinstance(moe_layer_freq, int):
        routed = [int(i % moe_layer_freq == 0) for i in range(num_layers)]
    else:
        routed = list(moe_layer_freq)
    if len(routed) != num_layers or num_layers % (pp * vp):
        raise ReplayError("layers", f"{len(routed)} layer flags for {num_layers} layers in {pp * vp} equal chunks")
    width = num_layers // (pp * vp)
    first = (vp_stage * pp + pp_rank) * width
    return [layer for layer in range(first, first + width) if routed[layer]]
