"""One chat turn: plan, generate, check, commit. Until the commit nothing changes, after it everything has."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from miles_tito.engines.checks import check_reply
from miles_tito.errors import EngineError, IdentityViolation, RequestError, SessionBusyError
from miles_tito.protocols import FinishKind, GenerateReply, GenerateRequest, SamplingParams
from miles_tito.seeds import derive_seed
from miles_tito.session import ChatTurn, Plan, Session, finish_kind
from miles_tito.versions import check_versions

from .state import ServerState


class ClientGoneError(Exception):
    """The client closed its connection before the engine had answered."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What the client gets. `node` is the index of the committed turn, None when the session was deleted meanwhile."""

    reply: GenerateReply
    message: Mapping[str, Any]
    kind: FinishKind
    node: int | None


async def run_turn(state: ServerState, session: Session, turn: ChatTurn, request: Request) -> TurnResult:
    """Serve one request of a session. Raises `SessionBusyError`, what `Session.plan` raises, `EngineError`,
    `ClientGoneError`, or an `IdentityViolation`, which also marks the session."""
    if session.busy:
        raise SessionBusyError(
            f"session {session.session_id} is generating: a linear session takes one request at a time; wait for the "
            "reply or open "
            "another session"
        )
    session.busy = True
    try:
        return await _generate_and_commit(state, session, turn, request)
    except IdentityViolation as violation:
        session.violation = violation
        raise
    finally:
        session.busy = False
        state.store.touch(session)


async def _generate_and_commit(state: ServerState, session: Session, turn: ChatTurn, request: Request) -> TurnResult:
    await state.learn_engine()
    session.moe = state.moe
    plan = session.plan(turn)
    call = _engine_request(state, session, plan, turn.sampling)
    at_dispatch, started_s = state.bounds, time.time()
    reply = await _generate(state, call, request)
    where = f"session {session.session_id}, turn {plan.keep_turns}"
    check_reply(call, reply)
    known = check_versions(where, reply, at_dispatch, state.bounds) == "checked"
    message = state.family.parse(reply.output_ids).message(state.call_ids)
    node = None
    if not session.closed:
        node = session.commit(plan, reply, message, started_s=started_s, ended_s=time.time(), known=known)
    return TurnResult(reply, message, finish_kind(state.family, reply), node)


def _engine_request(state: ServerState, session: Session, plan: Plan, sampling: SamplingParams) -> GenerateRequest:
    seed = sampling.sampling_seed
    if seed is None and session.seed is not None:
        seed = derive_seed(session.seed, session.commits)
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *state.family.stop_ids)))
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        session_key=session.session_id,
        input_ids=session.input_ids(plan),
        sampling=replace(
            sampling,
            sampling_seed=seed,
            stop_token_ids=stops,
            max_new_tokens=_answer_length(state.max_context_tokens, plan.prompt_length, sampling.max_new_tokens),
        ),
        want_experts=state.moe is not None,
        expert_row_start=plan.expert_row_start,
        expert_prefix=session.expert_prefix(plan) if state.moe is not None and state.moe.replays_routes else None,
    )


def _answer_length(limit: int | None, prompt_length: int, wanted: int) -> int:
    if limit is None:
        return wanted
    if prompt_length >= limit:
        raise RequestError(
            f"the prompt has {prompt_length} tokens and the context {limit} (the smaller of session.max_context_tokens "
            "and the engine's own): nothing can be generated",
            code="context_length_exceeded",
            field="messages",
        )
    return min(wanted, limit - prompt_length)


async def _generate(state: ServerState, call: GenerateRequest, request: Request) -> GenerateReply:
    """The engine's reply. When the client goes away first, the engine is told to stop and `ClientGoneError` is
    raised."""
    generation = asyncio.ensure_future(state.engine.generate(call))
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({generation, watch}, return_when=asyncio.FIRST_COMPLETED)
        if generation.done():
            return generation.result()
        await _stop(state, call, generation)
        raise ClientGoneError
    finally:
        watch.cancel()
        if not generation.done():
            await _stop(state, call, generation)


async def _stop(state: ServerState, call: GenerateRequest, generation: asyncio.Future[GenerateReply]) -> None:
    generation.cancel()
    await asyncio.gather(generation, return_exceptions=True)
    try:
        await state.engine.abort(call.request_id)
    except EngineError:
        return


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
