"""Where reasoning ends and the answer begins, by token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Ids of a turn, split: `reasoning` is None when the turn has none; `open` when it was never closed."""

    reasoning: tuple[int, ...] | None
    content: tuple[int, ...]
    open: bool = False


def split_reasoning(
    ids: Sequence[int], opener: int, closer: int, decode: Callable[[Sequence[int]], str], *, opened: bool = False
) -> Reasoning:
    """Split sampled ids at the first `closer`, when the prompt opened reasoning (`opened`) or the turn begins with
    `opener`.

    Without a closer everything is reasoning. Later closers belong to the content.
    """
    start = 0
    if not opened:
        found = _leading(ids, opener, decode)
        if found is None:
            return Reasoning(None, tuple(ids))
        start = found + 1
    if closer not in ids[start:]:
        return Reasoning(tuple(ids[start:]), (), open=True)
    end = list(ids).index(closer, start)
    return Reasoning(tuple(ids[start:end]), tuple(ids[end + 1 :]))


def _leading(ids: Sequence[int], opener: int, decode: Callable[[Sequence[int]], str]) -> int | None:
    """Index of `opener` when nothing but whitespace stands before it."""
    if opener not in ids:
        return None
    index = list(ids).index(opener)
    return index if not decode(ids[:index]).strip() else None
