"""Control routes: abort, pause, continue, flush."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.errors import RequestError
from miles_rollout.server.bodies import AbortBody, Body, PauseBody, read_body


async def abort_request(request: Request) -> Response:
    """End requests by prefix of their id, or all; what they have is returned to their callers."""
    body = await read_body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestError("give rid or abort_all", code="invalid_field")
    aborted = await _engine(request).abort("" if body.abort_all else body.rid)
    return JSONResponse({"success": True, "message": f"{aborted} requests aborted", "num_aborted": aborted})


async def pause_generation(request: Request) -> Response:
    body = await read_body(request, PauseBody)
    await run_in_threadpool(_engine(request).port.pause, body.mode)
    return JSONResponse({"success": True, "message": f"paused ({body.mode})", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    await read_body(request, Body)
    await run_in_threadpool(_engine(request).port.resume)
    return JSONResponse({"success": True, "message": "generation goes on", "status": "ok"})


async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache; 400 while requests hold rows."""
    await run_in_threadpool(_engine(request).port.flush)
    return PlainTextResponse("Cache flushed.\n")


def _engine(request: Request) -> LocalEngine:
    engine: LocalEngine = request.app.state.engine
    return engine
