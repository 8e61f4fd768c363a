"""From a session to its trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codec import TrajectoryBatch
from .compare import Comparator, Mismatch
from .families.base import Family
from .messages import text_of
from .session import Committed, Session
from .trajectory import NOT_SAMPLED, RoutedExperts, Status, Trajectory, Turn, span_values, spans_of


@dataclass(frozen=True, slots=True)
class _Kept:
    """The turns that fit, the last of them perhaps cut, and whether anything was left out."""

    turns: tuple[Turn, ...]
    last: Committed
    cut: bool


def comparator_of(family: Family) -> Comparator:
    """The comparator with the settings of a family."""
    return Comparator(family.tokenizer, assistant_start=family.assistant_start, trim_texts=family.trim_texts)


def session_mismatches(session: Session) -> list[Mismatch]:
    """Compare a session's ids with a fresh rendering of its messages. Empty before the first turn."""
    if not session.turns:
        return []
    last = session.turns[-1]
    text = session.family.render(session.messages, last.tools, add_generation_prompt=False)
    return comparator_of(session.family).compare_text(text, session.ids.view().tolist(), cut=not last.closed)


def session_batch(session: Session, *, max_seq_len: int | None = None, compare: bool = True) -> TrajectoryBatch:
    """The trajectories of a session: one, or none with the reason `no_records` or `all_truncated`.

    With `max_seq_len`, turns are kept while they end within it; the first that does not is cut at its output end, its
    other ids stay in the turn as `trimmed_ids`, and what follows is dropped.
    """
    if not session.turns:
        return TrajectoryBatch((), "no_records")
    kept = _fit(session, max_seq_len)
    if kept is None:
        return TrajectoryBatch((), "all_truncated")
    mismatches = session_mismatches(session) if compare else []
    return TrajectoryBatch((_trajectory(session, kept, mismatches),))


def _fit(session: Session, limit: int | None) -> _Kept | None:
    turns: list[Turn] = []
    last: Committed | None = None
    for committed in session.turns:
        turn = committed.turn
        if limit is not None and turn.end > limit:
            if turn.prompt_length < limit:
                turns.append(_cut(session, committed, limit))
                last = committed
            return _Kept(tuple(turns), last, True) if last is not None else None
        turns.append(turn)
        last = committed
    assert last is not None
    return _Kept(tuple(turns), last, False)


def _cut(session: Session, committed: Committed, limit: int) -> Turn:
    turn = committed.turn
    rows = None
    if turn.expert_digest is not None and session.expert_rows is not None:
        rows = session.expert_rows.view(limit - 1, committed.n_rows).copy()
    return replace(
        turn,
        completion_length=limit - turn.prompt_length,
        trimmed_ids=(*session.ids.view(limit, turn.end).tolist(), *turn.trimmed_ids),
        trimmed_logprobs=np.concatenate([session.logprobs.view(limit, turn.end), turn.trimmed_logprobs]),
        trimmed_expert_rows=rows,
    )


def _trajectory(session: Session, kept: _Kept, mismatches: Sequence[Mismatch]) -> Trajectory:
    length = kept.turns[-1].end
    mask = np.zeros(length, np.uint8)
    versions = np.full(length, NOT_SAMPLED, np.int64)
    for turn in kept.turns:
        mask[turn.prompt_length : turn.end] = 1
        versions[turn.prompt_length : turn.end] = span_values(turn.version_spans, turn.completion_length)
    status: Status = "truncated" if kept.cut else session.status
    return Trajectory(
        trajectory_id=f"{session.session_id}-0",
        session_id=session.session_id,
        family=session.family.name,
        status=status,
        token_ids=session.ids.view(0, length).copy(),
        loss_mask=mask,
        logprobs=session.logprobs.view(0, length).copy(),
        weight_version_spans=spans_of(versions),
        turns=kept.turns,
        messages=session.messages[: kept.last.n_messages],
        tools=kept.last.tools,
        routed_experts=_experts(session, kept, length),
        temperature=kept.last.temperature,
        metadata={**session.metadata, "tito": _facts(session, mismatches)},
    )


def _experts(session: Session, kept: _Kept, length: int) -> RoutedExperts | None:
    if session.expert_rows is None or session.moe is None:
        return None
    n_possible = max(length - 1, 0)
    n_rows = min(kept.last.n_rows, n_possible)
    missing = ((n_rows, n_possible - n_rows),) if n_rows < n_possible else ()
    return RoutedExperts(
        rows=session.expert_rows.view(0, n_rows).copy(),
        layers=session.moe.layers,
        num_experts=session.moe.num_experts,
        top_k=session.moe.top_k,
        missing_spans=missing,
        version_spans=spans_of(_row_versions(kept.turns, n_rows, n_possible)),
    )


def _row_versions(turns: Sequence[Turn], n_rows: int, n_possible: int) -> NDArray[np.int64]:
    versions = np.full(n_possible, NOT_SAMPLED, np.int64)
    for turn in turns:
        for start, version in turn.expert_version_spans:
            versions[turn.expert_row_start + start :] = version
    versions[n_rows:] = NOT_SAMPLED
    return versions


def _facts(session: Session, mismatches: Sequence[Mismatch]) -> dict[str, Any]:
    """What the server knows of a path beyond its arrays."""
    return {
        "seed": session.seed,
        "turns_rolled_back": session.rolled_back,
        "version_bounds": "checked" if session.version_bounds_known else "unknown",
        "special_text_messages": _special_texts(session),
        "mismatches": [asdict(mismatch) | {"hard": mismatch.hard} for mismatch in mismatches],
    }


def _special_texts(session: Session) -> int:
    """Messages of the client whose text spells a control token: it became that token, as it would in the engine."""
    pattern = session.family.tokenizer.special_pattern
    texts = (text_of(message.get("content")) for message in session.messages if message["role"] != "assistant")
    return sum(pattern.search(text) is not None for text in texts)
