"""`POST /generate`: SGLang's request and reply over the engine, with the record digest."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.requests import EngineReply, EngineRequest
from miles_rollout.server.bodies import GenerateBody, engine_request, read_body
from miles_rollout.server.replies import reply_json


async def generate(request: Request) -> Response:
    """Run one request. It is aborted when the client goes away."""
    engine: LocalEngine = request.app.state.engine
    engine.check_serving()
    wanted = engine_request(await read_body(request, GenerateBody), engine.moe)
    reply = await _unless_disconnected(request, engine, wanted)
    if reply is None:
        return Response(status_code=499)
    return JSONResponse(reply_json(wanted, reply))


async def _unless_disconnected(request: Request, engine: LocalEngine, wanted: EngineRequest) -> EngineReply | None:
    generating = asyncio.ensure_future(engine.generate(wanted))
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({generating, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return generating.result() if generating.done() else None
    finally:
        for task in (generating, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
