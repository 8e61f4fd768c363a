"""Packing of sequences into micro-batches (THD): first-fit decreasing, order recoverable, equal counts on every rank.

Shapes: S sequences, N packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Bin:
    """Sequences of one micro-batch, by index, ascending. `filler`: runs to keep ranks in step, without weight."""

    members: tuple[int, ...]
    filler: bool = False


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Sequences one after another. `token_ids`, `positions` int64 [N]; `bounds` int32 [S+1], the cumulative lengths."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    bounds: NDArray[np.int32]


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Bins of at most `max_tokens` tokens; a longer sequence has one of its own. Ties keep the order given."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        slot = next((i for i, free in enumerate(room) if lengths[index] <= free), None)
        if slot is None:
            bins.append([])
            room.append(max_tokens)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= lengths[index]
    return [Bin(tuple(sorted(members))) for members in bins]


def level_bins(bins: Sequence[Bin], n_ranks: int) -> list[Bin]:
    """Split bins until their count is a multiple of `n_ranks`; where nothing can be split, repeat the smallest as
    filler.
    """
    levelled = list(bins)
    while levelled and len(levelled) % n_ranks:
        widest = max(range(len(levelled)), key=lambda i: (0 if levelled[i].filler else len(levelled[i].members), -i))
        members = levelled[widest].members
        if levelled[widest].filler or len(members) < 2:
            levelled.append(Bin(levelled[-1].members[:1], filler=True))
            continue
        half = len(members) // 2
        levelled[widest : widest + 1] = [Bin(members[:half]), Bin(members[half:])]
    return levelled


def rank_bins(bins: Sequence[Bin], rank: int, n_ranks: int) -> list[Bin]:
    """The bins of one rank: every `n_ranks`-th."""
    return list(bins[rank::n_ranks])


def pack_tokens(sequences: Sequence[NDArray[np.integer]]) -> PackedTokens:
    """Concatenate sequences; positions start again at 0 in each."""
    lengths = [len(sequence) for sequence in sequences]
    return PackedTokens(
        token_ids=np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences]),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    )
