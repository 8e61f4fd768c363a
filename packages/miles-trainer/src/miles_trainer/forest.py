"""Sequences as a forest: each token prefix that several of them share stands once.

A tree is a trie over symbols. A symbol is a token id and, where routes are replayed, the token's recorded experts: a
state is shared only when everything that went into it is equal.

Shapes: T tokens of a sequence, C columns of a symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Node:
    """Positions `start` … `stop - 1` of every sequence that runs through it. `parent` is a node index, -1 at a root."""

    parent: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Forest:
    """`nodes` in depth-first order, parents first; `paths`: of each sequence, its nodes from the root."""

    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    def length(self, nodes: Sequence[int] | set[int] | range) -> int:
        """Tokens of these nodes."""
        return sum(len(self.nodes[node]) for node in nodes)

    def shared_length(self, one: int, other: int) -> int:
        """Tokens that two sequences have in common."""
        return self.length(set(self.paths[one]) & set(self.paths[other]))

    def order(self) -> list[int]:
        """The sequences from the left of the forest to the right; a prefix stands before what continues it."""
        return sorted(range(len(self.paths)), key=lambda index: (self.paths[index], index))


@dataclass(frozen=True, slots=True)
class _Branch:
    """Sequences that are equal up to `at` and whose tokens from `start` on have no node yet."""

    members: tuple[int, ...]
    parent: int
    start: int
    at: int


def build_forest(sequences: Sequence[Symbols], *, min_shared_tokens: int | None) -> Forest:
    """The forest of sequences [T] or [T, C], none of them empty.

    A run that several sequences share gets a node of its own when it has at least `min_shared_tokens` tokens (at least
    1); a shorter one stays with each of them. None: nothing is shared.
    """
    symbols = [sequence.reshape(len(sequence), -1) for sequence in sequences]
    everyone = tuple(range(len(symbols)))
    groups = [(index,) for index in everyone] if min_shared_tokens is None else [everyone]
    waiting = [_Branch(group, -1, 0, 0) for group in reversed(groups) if group]
    nodes: list[Node] = []
    paths: list[list[int]] = [[] for _ in symbols]
    while waiting:
        branch = waiting.pop()
        stop = _common_stop([symbols[i] for i in branch.members], branch.at)
        start, parent = branch.start, branch.parent
        if stop > start and (len(branch.members) == 1 or stop - start >= (min_shared_tokens or 1)):
            parent = len(nodes)
            nodes.append(Node(branch.parent, start, stop))
            for member in branch.members:
                paths[member].append(parent)
            start = stop
        waiting += [
            _Branch(part, parent, start, stop) for part in reversed(_parts(symbols, branch.members, start, stop))
        ]
    return Forest(tuple(nodes), tuple(tuple(path) for path in paths))


def _common_stop(members: Sequence[Symbols], at: int) -> int:
    """End of the run from `at` that all members have in common."""
    first, *others = members
    stop = min(len(member) for member in members)
    for other in others:
        differs = (first[at:stop] != other[at:stop]).any(axis=1)
        if differs.any():
            stop = at + int(differs.argmax())
    return stop


def _parts(symbols: Sequence[Symbols], members: Sequence[int], start: int, stop: int) -> list[tuple[int, ...]]:
    """Members by their symbol at `stop`. One that ends there is by itself, or done if all its tokens have a node."""
    parts: dict[bytes | int, list[int]] = {}
    for member in members:
        if len(symbols[member]) > stop:
            parts.setdefault(symbols[member][stop].tobytes(), []).append(member)
        elif start < stop:
            parts[member] = [member]
    return [tuple(part) for part in parts.values()]
