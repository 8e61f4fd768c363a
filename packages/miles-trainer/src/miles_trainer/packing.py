"""Packing of sequences into micro-batches: shared prefixes once, capacity in computed tokens, as many on each rank.

Shapes: N packed tokens of one micro-batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_trainer.forest import Forest


@dataclass(frozen=True, slots=True)
class Bin:
    """Sequences of one micro-batch, by index, left to right. `filler`: runs to keep ranks in step, without weight."""

    members: tuple[int, ...]
    filler: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed tokens `start` … `stop - 1`, a piece of a path. They see their ancestors' tokens and, causally, their own.

    `parent` is the index of the segment before it on the path, None at the root; `first_position`: tokens before it.
    """

    start: int
    stop: int
    parent: int | None = None
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class PackedForest:
    """Where everything stands in one row of N tokens.

    `segments` tile the row. `positions` int64 [N] continue along each path. `places` are int64 [T], one for each
    member: the packed index of each of its tokens. `owners` int64 [N]: a member that has this token. `shares` int64
    [N]: how many members have it.
    """

    segments: tuple[Segment, ...]
    positions: NDArray[np.int64]
    places: tuple[NDArray[np.int64], ...]
    owners: NDArray[np.int64]
    shares: NDArray[np.int64]


def fill_bins(forest: Forest, max_tokens: int) -> list[Bin]:
    """Bins that compute at most `max_tokens` tokens; a longer sequence has one of its own.

    Trees come by decreasing length of their longest path, so that without sharing this is first-fit decreasing. Inside
    a tree each sequence goes, from left to right, where it adds the fewest tokens.
    """
    bins: list[list[int]] = []
    held: list[set[int]] = []
    room: list[int] = []
    for sequence in _filling_order(forest):
        path = forest.paths[sequence]
        added = [forest.length([node for node in path if node not in nodes]) for nodes in held]
        fitting = [slot for slot, tokens in enumerate(added) if tokens <= room[slot]]
        if fitting:
            slot = min(fitting, key=lambda candidate: added[candidate])
        else:
            slot = len(bins)
            bins.append([])
            held.append(set())
            room.append(max_tokens)
            added.append(forest.length(path))
        bins[slot].append(sequence)
        held[slot].update(path)
        room[slot] -= added[slot]
    rank = {sequence: place for place, sequence in enumerate(forest.order())}
    return [Bin(tuple(sorted(members, key=rank.__getitem__))) for members in bins]


def _filling_order(forest: Forest) -> list[int]:
    longest: dict[int, int] = {}
    for path in forest.paths:
        longest[path[0]] = max(longest.get(path[0], 0), forest.length(path))
    return sorted(forest.order(), key=lambda sequence: -longest[forest.paths[sequence][0]])


def level_bins(bins: Sequence[Bin], n_ranks: int, forest: Forest) -> list[Bin]:
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
        cut = _cut(members, forest)
        levelled[widest : widest + 1] = [Bin(members[:cut]), Bin(members[cut:])]
    return levelled


def _cut(members: Sequence[int], forest: Forest) -> int:
    """Where to split: in the middle half, between the two neighbours that share least, so that groups stay whole."""
    count = len(members)
    cuts = range(max(count // 4, 1), max(3 * count // 4, 1) + 1)
    return min(
        cuts,
        key=lambda cut: (forest.shared_length(members[cut - 1], members[cut]), abs(cut - count / 2)),
    )


def rank_bins(bins: Sequence[Bin], rank: int, n_ranks: int) -> list[Bin]:
    """The bins of one rank: every `n_ranks`-th."""
    return list(bins[rank::n_ranks])


def lay_out(forest: Forest, members: Sequence[int]) -> PackedForest:
    """The nodes of some sequences one after another; a node that only one other continues forms one segment with it."""
    paths = [forest.paths[member] for member in members]
    nodes = sorted({node for path in paths for node in path})
    ends = np.cumsum([len(forest.nodes[node]) for node in nodes])
    first = {node: int(end) - len(forest.nodes[node]) for node, end in zip(nodes, ends, strict=True)}
    places = tuple(_row_indices((first[node], len(forest.nodes[node])) for node in path) for path in paths)
    owners, shares = np.zeros(int(ends[-1]), np.int64), np.zeros(int(ends[-1]), np.int64)
    for member, place in zip(members, places, strict=True):
        owners[place] = member
        shares[place] += 1
    return PackedForest(
        segments=_segments(forest, nodes, first),
        positions=_row_indices((forest.nodes[node].start, len(forest.nodes[node])) for node in nodes),
        places=places,
        owners=owners,
        shares=shares,
    )


def _row_indices(runs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, start + count, dtype=np.int64) for start, count in runs])


def _segments(forest: Forest, nodes: Sequence[int], first: dict[int, int]) -> tuple[Segment, ...]:
    children: dict[int, int] = {}
    for node in nodes:
        parent = forest.nodes[node].parent
        children[parent] = children.get(parent, 0) + 1
    segments: list[Segment] = []
    of_node: dict[int, int] = {}
    for node in nodes:
        spot = forest.nodes[node]
        before = of_node.get(spot.parent)
        stop = first[node] + len(spot)
        if before is not None and children[spot.parent] == 1:
            grown = segments[before]
            segments[before] = Segment(grown.start, stop, grown.parent, grown.first_position)
            of_node[node] = before
            continue
        of_node[node] = len(segments)
        segments.append(Segment(first[node], stop, before, spot.start))
    return tuple(segments)
