"""Routes of the sessions themselves: open, look at, collect, delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miles_tito.assemble import session_batch, session_mismatches
from miles_tito.codec import dumps_batch
from miles_tito.errors import IdentityViolation, RequestError
from miles_tito.records import verify_records
from miles_tito.session import Session

from .body import read_object
from .chat import parse_sampling
from .state import ServerState


def state_of(request: Request) -> ServerState:
    """The state of the server that got this request."""
    state: ServerState = request.app.state.tito
    return state


async def create_session(request: Request) -> Response:
    """`POST /sessions` with `{seed?, sampling?, metadata?}`."""
    state = state_of(request)
    body = await read_object(request, state.config.server.max_body_bytes, optional=True)
    unknown = sorted(body.keys() - {"seed", "sampling", "metadata"})
    if unknown:
        raise RequestError(
            f"unknown fields {unknown}: a session takes seed, sampling and metadata", code="unsupported_field"
        )
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise RequestError(f"seed is {seed!r}, expected an integer", code="invalid_value", field="seed")
    sampling = parse_sampling(_object(body, "sampling"), "sampling")
    if "sampling_seed" in sampling:
        raise RequestError("give the session's seed as `seed`", code="invalid_value", field="sampling.sampling_seed")
    session = state.store.create(seed=seed, sampling=sampling, metadata=_object(body, "metadata"))
    return JSONResponse({"session_id": session.session_id})


async def list_sessions(request: Request) -> Response:
    """`GET /sessions`: counts, and one line a session."""
    store = state_of(request).store
    lines = [
        {
            "session_id": session.session_id,
            "turns": len(session.turns),
            "tokens": len(session.ids),
            "busy": session.busy,
            "violation": session.violation.code if session.violation else None,
        }
        for session in store
    ]
    return JSONResponse({"open": len(store), "created": store.created, "expired": store.expired, "sessions": lines})


async def show_session(request: Request) -> Response:
    """`GET /sessions/{id}`: messages, turns and ids as stored, and how they compare with a fresh rendering."""
    session = state_of(request).store.get(request.path_params["session_id"])
    mismatches = [asdict(mismatch) | {"hard": mismatch.hard} for mismatch in session_mismatches(session)]
    return JSONResponse(
        {
            "session_id": session.session_id,
            "status": session.status,
            "violation": session.violation.code if session.violation else None,
            "messages": list(session.messages),
            "turns": [_turn_line(session, index) for index in range(len(session.turns))],
            "metadata": {
                **session.metadata,
                "accumulated_token_ids": session.ids.view().tolist(),
                "max_trim_tokens": session.family.max_trim,
                "tito_session_mismatch": mismatches,
            },
        }
    )


async def delete_session(request: Request) -> Response:
    """`DELETE /sessions/{id}`."""
    state_of(request).store.delete(request.path_params["session_id"])
    return Response(status_code=204)


async def collect_session(request: Request) -> Response:
    """`POST /sessions/{id}/samples`: the trajectories, each checked against its records first."""
    state = state_of(request)
    session = state.store.get(request.path_params["session_id"])
    body = await read_object(request, state.config.server.max_body_bytes, optional=True)
    limit = body.get("max_seq_len")
    if body.keys() - {"max_seq_len"} or not (limit is None or (type(limit) is int and limit > 0)):
        raise RequestError(f"samples takes max_seq_len, a positive integer; got {body}", code="invalid_value")
    if session.violation is not None:
        raise session.violation.with_traceback(None)
    batch = session_batch(session, max_seq_len=limit, compare=state.config.session.compare_at_collect)
    try:
        for trajectory in batch.trajectories:
            verify_records(trajectory)
    except IdentityViolation as violation:
        session.violation = violation
        raise
    state.store.touch(session)
    return Response(dumps_batch(batch), media_type="application/octet-stream")


def _turn_line(session: Session, index: int) -> dict[str, Any]:
    committed = session.turns[index]
    turn = committed.turn
    return {
        "index": index,
        "prompt_length": turn.prompt_length,
        "completion_length": turn.completion_length,
        "finish_reason": turn.finish_reason,
        "cached_tokens": turn.cached_tokens,
        "version_spans": [list(span) for span in turn.version_spans],
        "engine_id": turn.engine_id,
        "record_digest": turn.record_digest,
        "expert_digest": turn.expert_digest,
        "started_s": turn.started_s,
        "ended_s": turn.ended_s,
    }


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {type(value).__name__}, expected an object", code="invalid_value", field=name)
    return value
