"""The ASGI application of an engine."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.errors import EngineError
from miles_rollout.server import control, generate, info, weights
from miles_rollout.server.distributed import BroadcastGroups
from miles_rollout.server.problems import engine_problem, http_problem, internal_problem, problem

Handler = Callable[[Request], Awaitable[Response]]


def create_engine_app(engine: LocalEngine, *, control_token: str | None = None) -> Starlette:
    """Return the application over `engine`, which is started with it.

    Control routes ask for `Authorization: Bearer <control_token>` when a token is given. Errors are problem+json.
    """

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield

    open_routes = [
        Route("/generate", generate.generate, methods=["POST"]),
        Route("/health", info.health),
        Route("/health_generate", info.health_generate),
        Route("/model_info", info.model_info),
        Route("/get_model_info", info.model_info),
        Route("/metrics", info.MetricsPage().__call__),
    ]
    app = Starlette(
        routes=open_routes + _control_routes(control_token),
        lifespan=lifespan,
        exception_handlers={
            EngineError: engine_problem,
            HTTPException: http_problem,
            Exception: internal_problem,
        },
    )
    app.state.engine = engine
    app.state.groups = BroadcastGroups()
    return app


def _control_routes(token: str | None) -> list[Route]:
    post: dict[str, Handler] = {
        "/abort_request": control.abort_request,
        "/pause_generation": control.pause_generation,
        "/continue_generation": control.continue_generation,
        "/update_weights_from_disk": weights.update_weights_from_disk,
        "/update_weight_version": weights.update_weight_version,
        "/init_weights_update_group": weights.init_weights_update_group,
        "/destroy_weights_update_group": weights.destroy_weights_update_group,
        "/update_weights_from_distributed": weights.update_weights_from_distributed,
        "/update_weights_from_tensor": weights.refuse_pickled_tensors,
    }
    both: dict[str, Handler] = {"/flush_cache": control.flush_cache}
    get: dict[str, Handler] = {"/server_info": info.server_info, "/get_server_info": info.server_info}
    tables = ((post, ["POST"]), (both, ["GET", "POST"]), (get, ["GET"]))
    return [
        Route(path, _guarded(handler, token), methods=methods)
        for table, methods in tables
        for path, handler in table.items()
    ]


def _guarded(handler: Handler, token: str | None) -> Handler:
    if token is None:
        return handler
    expected = f"Bearer {token}".encode()

    async def guarded(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            return problem(401, "unauthorized", "this route needs the control token: send Authorization: Bearer …")
        return await handler(request)

    return guarded
