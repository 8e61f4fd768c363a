"""A linear session: one growing buffer of ids, and the rules by which a conversation continues it. No HTTP, no engine.

A request is first planned (nothing changes), then generated elsewhere, then committed (everything changes, or nothing).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buffer import GrowableArray
from .errors import EngineReplyError, HistoryError, IdentityViolation, RequestError, TruncatedTurnError
from .families.base import Family
from .matching import Matcher, first_difference
from .protocols import FinishKind, GenerateReply, MoeInfo, SamplingParams
from .splice import StoredTurn, first_prompt_ids, next_prompt_suffix
from .trajectory import Status, Turn, expert_dtype

Message = Mapping[str, Any]
MAX_ROLLBACK = 1


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What one request asks: normalised messages, tools, template options, and sampling (without a derived seed)."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] | None
    template_kwargs: Mapping[str, Any]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request will do to the session when its reply is committed.

    The engine's input is the first `kept_ids` stored ids and `suffix_ids`. `commits` is the session's count when
    planned.
    """

    keep_turns: int
    kept_ids: int
    suffix_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] | None
    temperature: float
    expert_row_start: int
    commits: int

    @property
    def prompt_length(self) -> int:
        return self.kept_ids + len(self.suffix_ids)


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed turn, and how long everything was right after it."""

    turn: Turn
    n_messages: int
    n_rows: int
    tools: tuple[Message, ...] | None
    temperature: float
    closed: bool


class Session:
    """State of one linear session."""

    def __init__(
        self,
        session_id: str,
        family: Family,
        matcher: Matcher,
        *,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        close_truncated: bool = False,
    ) -> None:
        self.session_id = session_id
        self.family = family
        self.matcher = matcher
        self.seed = seed
        self.sampling = dict(sampling or {})
        self.metadata = dict(metadata or {})
        self.close_truncated = close_truncated
        self.ids: GrowableArray[np.int32] = GrowableArray(np.int32)
        self.logprobs: GrowableArray[np.float32] = GrowableArray(np.float32)
        self.expert_rows: GrowableArray[Any] | None = None
        self.moe: MoeInfo | None = None
        self.messages: tuple[Message, ...] = ()
        self.turns: list[Committed] = []
        self.commits = 0
        self.rolled_back = 0
        self.version_bounds_known = True
        self.violation: IdentityViolation | None = None
        self.busy = False
        self.closed = False

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, request: ChatTurn) -> Plan:
        """Decide what `request` continues. Raises `RequestError`, `HistoryError` or `TruncatedTurnError`; changes
        nothing."""
        if self.violation is not None:
            raise self.violation.with_traceback(None)
        self.family.check(request.messages, request.tools)
        self.family.merge_kwargs(request.template_kwargs)
        keep = self._turns_to_keep(request.messages)
        temperature = request.sampling.temperature or 1.0
        if keep == 0:
            ids = first_prompt_ids(self.family, request.messages, request.tools, request.template_kwargs)
            return Plan(0, 0, tuple(ids), request.messages, request.tools, temperature, 0, self.commits)
        last = self.turns[keep - 1]
        self._check_lineage(request, last, temperature)
        stored = self._stored_before_suffix(keep)
        appended = request.messages[len(stored) :]
        self.family.check_appended(appended, len(stored))
        suffix = next_prompt_suffix(
            self.family, self._stored_turn(last), stored, appended, request.tools, request.template_kwargs
        )
        messages = (*stored, *appended)
        return Plan(keep, last.turn.end, tuple(suffix), messages, request.tools, temperature, last.n_rows, self.commits)

    def input_ids(self, plan: Plan) -> list[int]:
        """The engine's input for `plan`."""
        ids: list[int] = self.ids.view(0, plan.kept_ids).tolist()
        return [*ids, *plan.suffix_ids]

    def expert_prefix(self, plan: Plan) -> NDArray[np.int32] | None:
        """The routes recorded for the rows before `plan.expert_row_start`, int32 [R, L, K]; None without any."""
        if self.expert_rows is None or not plan.expert_row_start:
            return None
        return self.expert_rows.view(0, plan.expert_row_start).astype(np.int32)

    def _turns_to_keep(self, messages: Sequence[Message]) -> int:
        """How many committed turns the request continues: all, all but one (a retry), or it is an error."""
        matched = self._matched(messages)
        if matched == len(self.messages):
            return len(self.turns)
        self._refuse_rewritten(messages, matched)
        keep = sum(turn.n_messages <= matched for turn in self.turns)
        discarded = len(self.turns) - keep
        if discarded > MAX_ROLLBACK:
            raise HistoryError(
                f"the request agrees with the first {matched} of {len(self.messages)} stored messages, so {discarded} "
                "generated "
                f"turns would be discarded; at most {MAX_ROLLBACK} can be (stored has {len(self.messages)} messages, "
                "request has "
                f"{len(messages)})",
                code="rollback_too_deep",
                message_index=matched,
            )
        return keep

    def _matched(self, messages: Sequence[Message]) -> int:
        pairs = zip(self.messages, messages, strict=False)
        return next(
            (i for i, (stored, replayed) in enumerate(pairs) if not self.matcher(stored, replayed)),
            min(len(self.messages), len(messages)),
        )

    def _refuse_rewritten(self, messages: Sequence[Message], at: int) -> None:
        """A generated assistant that comes back changed, with messages behind it, is not a retry."""
        generated = any(turn.n_messages - 1 == at for turn in self.turns)
        behind = len(messages) > at + 1
        if not (generated and behind and messages[at]["role"] == "assistant"):
            return
        difference = first_difference(self.messages[at], messages[at])
        accepted = f"; the matcher {difference.accepted_by} would accept it" if difference.accepted_by else ""
        raise HistoryError(
            f"message {at} was generated in this session and came back with another {difference.field}: stored "
            f"{difference.stored!r}, replayed {difference.replayed!r}{accepted}; send generated messages back "
            "unchanged",
            code="history_rewritten",
            message_index=at,
            field=difference.field,
        )

    def _check_lineage(self, request: ChatTurn, last: Committed, temperature: float) -> None:
        if _canonical(request.tools) != _canonical(last.tools):
            raise RequestError(
                "tools changed in mid-session: the stored prompt declares the first ones and cannot be rewritten; "
                "send the same "
                "tools with every request or open a new session",
                code="tools_changed",
                field="tools",
            )
        if temperature != last.temperature:
            raise RequestError(
                f"temperature changed from {last.temperature} to {temperature} in mid-session: a trajectory is scored "
                "at one "
                "temperature; keep it or open a new session",
                code="temperature_changed",
                field="temperature",
            )
        if not last.closed and not self.close_truncated:
            raise TruncatedTurnError(
                f"the last turn of session {self.session_id} ended by {last.turn.finish_reason!r} without a stop "
                "token, so nothing "
                "can be appended to it; retry that turn with a larger max_tokens, or start the server with "
                "on_truncation = 'close'"
            )

    def _stored_before_suffix(self, keep: int) -> tuple[Message, ...]:
        return self.messages[: self.turns[keep - 1].n_messages]

    def _stored_turn(self, last: Committed) -> StoredTurn:
        return StoredTurn(self.ids.view(last.turn.prompt_length, last.turn.end).tolist())

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(
        self,
        plan: Plan,
        reply: GenerateReply,
        message: Message,
        *,
        started_s: float,
        ended_s: float,
        known: bool = True,
    ) -> int:
        """Store a reply; returns the index of the turn. Raises `EngineReplyError` and changes nothing when it cannot
        be stored."""
        if plan.commits != self.commits:
            raise RuntimeError(f"session {self.session_id} changed between plan and commit")
        rows = self._rows_of(plan, reply)
        turn = _turn_of(self.family, plan, reply, started_s, ended_s)
        self._rewind(plan.keep_turns)
        self._append(plan, reply, rows)
        self.messages = (*plan.messages, message)
        n_rows = 0 if self.expert_rows is None else len(self.expert_rows)
        closed = bool(reply.output_ids) and self.family.is_closed(reply.output_ids[-1])
        self.turns.append(Committed(turn, len(self.messages), n_rows, plan.tools, plan.temperature, closed))
        self.commits += 1
        self.version_bounds_known = self.version_bounds_known and known
        return len(self.turns) - 1

    def _rows_of(self, plan: Plan, reply: GenerateReply) -> NDArray[Any] | None:
        """Expert rows of a reply in their stored dtype, checked against what was asked for."""
        if self.moe is None or (reply.experts is None and not reply.output_ids):
            return None
        if reply.experts is None:
            raise EngineReplyError(f"engine {reply.engine_id} sent no routed experts although they were asked for")
        rows, moe = reply.experts.rows, self.moe
        n_rows = plan.prompt_length + len(reply.output_ids) - 1 - plan.expert_row_start
        expected = (n_rows, len(moe.layers), moe.top_k)
        if rows.shape != expected or reply.experts.row_start != plan.expert_row_start:
            raise EngineReplyError(
                f"engine {reply.engine_id} sent expert rows {list(rows.shape)} from row {reply.experts.row_start}; "
                "expected "
                f"{list(expected)} from row {plan.expert_row_start}"
            )
        if rows.size and not (int(rows.min()) >= 0 and int(rows.max()) < moe.num_experts):
            raise EngineReplyError(f"engine {reply.engine_id} named expert {int(rows.max())} of {moe.num_experts}")
        return rows.astype(expert_dtype(moe.num_experts))

    def _rewind(self, keep_turns: int) -> None:
        self.rolled_back += len(self.turns) - keep_turns
        del self.turns[keep_turns:]
        last = self.turns[-1] if self.turns else None
        self.ids.truncate(last.turn.end if last else 0)
        self.logprobs.truncate(last.turn.end if last else 0)
        if self.expert_rows is not None:
            self.expert_rows.truncate(last.n_rows if last else 0)

    def _append(self, plan: Plan, reply: GenerateReply, rows: NDArray[Any] | None) -> None:
        self.ids.append(np.asarray([*plan.suffix_ids, *reply.output_ids], np.int32))
        self.logprobs.append(np.zeros(len(plan.suffix_ids), np.float32))
        self.logprobs.append(reply.logprobs)
        if rows is not None:
            if self.expert_rows is None:
                self.expert_rows = GrowableArray(rows.dtype, rows.shape[1:])
            self.expert_rows.append(rows)

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """Status of the path as it stands."""
        if not self.turns:
            return "failed"
        return _STATUS[self.turns[-1].turn.finish_reason]


_STATUS: dict[FinishKind, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def _turn_of(family: Family, plan: Plan, reply: GenerateReply, started_s: float, ended_s: float) -> Turn:
    spans = reply.version_spans
    return Turn(
        prompt_length=plan.prompt_length,
        completion_length=len(reply.output_ids),
        finish_reason=finish_kind(family, reply),
        cached_tokens=reply.cached_tokens,
        version_start=spans[0][1] if spans else -1,
        version_end=spans[-1][1] if spans else -1,
        version_spans=spans,
        record_digest=reply.record_digest,
        engine_id=reply.engine_id,
        started_s=started_s,
        ended_s=ended_s,
        expert_digest=reply.expert_digest if reply.experts is not None else None,
        expert_row_start=plan.expert_row_start,
        expert_version_spans=reply.experts.version_spans if reply.experts is not None else (),
    )


def finish_kind(family: Family, reply: GenerateReply) -> FinishKind:
    """Why a turn ended, decided from its ids: a "stop" that shows neither a stop id nor a stop string was a cut."""
    kind = reply.finish.kind
    if kind != "stop":
        return kind
    closed = bool(reply.output_ids) and family.is_closed(reply.output_ids[-1])
    return "stop" if closed or reply.finish.matched is not None else "length"


def _canonical(tools: Sequence[Message] | None) -> str:
    return json.dumps(tools or None, sort_keys=True)
