"""The ASGI application."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from miles_tito.config import TitoConfig
from miles_tito.errors import TitoError
from miles_tito.families.base import Family
from miles_tito.protocols import SamplingParams, TokenEngine
from miles_tito.session import Session
from miles_tito.store import SessionStore
from miles_tito.tokenizer import Tokenizer

from .body import BodyTooLargeError, read_object
from .chat import ChatOptions, chunk_body, parse_chat, reply_body
from .control import set_versions
from .problems import ProblemResponse, problem_of
from .sessions import collect_session, create_session, delete_session, list_sessions, show_session, state_of
from .state import CallIdFactory, ServerState, random_call_id
from .turn import ClientGoneError, run_turn

CLIENT_CLOSED = 499


def create_app(
    config: TitoConfig,
    *,
    engine: TokenEngine,
    tokenizer: Tokenizer,
    family: Family,
    control_token: str | None = None,
    store: SessionStore | None = None,
    call_ids: CallIdFactory = random_call_id,
) -> Starlette:
    """The session server over `engine`, which it closes when it shuts down.

    With `control_token`, the control route wants it as a bearer token. `call_ids` names tool calls whose family
    prints no ids. `app.state.tito` is the server's state, `app.state.tito.store` its sessions.
    """
    state = ServerState(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        family=family,
        store=store if store is not None else SessionStore(family, config.session),
        control_token=control_token,
        call_ids=call_ids,
    )
    session = "/sessions/{session_id}"
    app = Starlette(
        routes=[
            Route("/health", _health, methods=["GET"]),
            Route("/sessions", create_session, methods=["POST"]),
            Route("/sessions", list_sessions, methods=["GET"]),
            Route(session, show_session, methods=["GET"]),
            Route(session, delete_session, methods=["DELETE"]),
            Route(f"{session}/v1/chat/completions", _chat, methods=["POST"]),
            Route(f"{session}/v1/models", _models, methods=["GET"]),
            Route(f"{session}/samples", collect_session, methods=["POST"]),
            Route("/control/versions", set_versions, methods=["POST"]),
        ],
        exception_handlers={
            TitoError: _on_error,
            BodyTooLargeError: _on_large_body,
            ClientGoneError: _on_client_gone,
            HTTPException: _on_http,
            Exception: _on_bug,
        },
        lifespan=_lifespan,
    )
    app.state.tito = state
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    await app.state.tito.engine.aclose()


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _models(request: Request) -> Response:
    """The engine's model, asked for by agents that list models first."""
    state = state_of(request)
    state.store.get(request.path_params["session_id"])
    await state.learn_engine()
    return JSONResponse({"object": "list", "data": [{"id": state.model_name, "object": "model", "owned_by": "miles"}]})


async def _chat(request: Request) -> Response:
    state = state_of(request)
    session = state.store.get(request.path_params["session_id"])
    body = await read_object(request, state.config.server.max_body_bytes)
    turn, options = parse_chat(body, _defaults(state, session))
    result = await run_turn(state, session, turn, request)
    answer = reply_body(result.reply, result.message, result.kind, options, state.tokenizer, int(time.time()))
    headers = {} if result.node is None else {"x-tito-node": str(result.node)}
    return _stream(answer, options, headers) if options.stream else JSONResponse(answer, headers=headers)


def _defaults(state: ServerState, session: Session) -> SamplingParams:
    """Sampling where the request is silent: the session's options over the server's."""
    return SamplingParams(**{"max_new_tokens": state.config.session.default_max_new_tokens, **session.sampling})


def _stream(answer: dict[str, Any], options: ChatOptions, headers: dict[str, str]) -> Response:
    """The whole answer as one chunk of server-sent events: the turn was committed before its first byte is sent."""
    chunk = json.dumps(chunk_body(answer, options), ensure_ascii=False, separators=(",", ":"))
    return Response(
        f"data: {chunk}\n\ndata: [DONE]\n\n",
        media_type="text/event-stream",
        headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TitoError)
    return problem_of(error)


async def _on_large_body(request: Request, error: Exception) -> Response:
    return ProblemResponse(413, BodyTooLargeError.default_code, str(error))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return ProblemResponse(CLIENT_CLOSED, "client_closed", "the client closed its connection; nothing was stored")


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that it is logged.
    return ProblemResponse(500, "internal_error", "the server failed; its log has the reason")


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return ProblemResponse(error.status_code, codes.get(error.status_code, "http_error"), detail)
