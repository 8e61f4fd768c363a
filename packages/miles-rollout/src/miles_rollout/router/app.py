"""The router's ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from miles_rollout.config import RouterConfig
from miles_rollout.router.fleet import Engine, Fleet, check_url
from miles_rollout.router.health import HealthMonitor
from miles_rollout.router.metrics import merge_pages
from miles_rollout.router.policies import POLICIES, Clock
from miles_rollout.router.proxy import BodyTooLargeError, Proxy
from miles_rollout.server.problems import http_problem, internal_problem, problem

CLIENT_GONE = 499
"""For the log only: nobody reads this answer."""

Handler = Callable[[Request], Awaitable[Response]]


def create_router_app(
    config: RouterConfig,
    *,
    control_token: str | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Clock = time.monotonic,
) -> Starlette:
    """The application. Registering and aborting need `Authorization: Bearer <control_token>` when one is given.

    `transport` replaces the network towards the engines. `app.state.fleet` and `app.state.monitor` are its parts.
    """
    return _Router(config, control_token, transport, clock).app


class _Router:
    """The routes and what they share."""

    def __init__(
        self, config: RouterConfig, token: str | None, transport: httpx.AsyncBaseTransport | None, clock: Clock
    ) -> None:
        self._config = config
        self._token = token
        timeout = httpx.Timeout(config.request_timeout_s, connect=config.connect_timeout_s)
        limits = httpx.Limits(
            max_connections=config.max_connections, max_keepalive_connections=256, keepalive_expiry=2.0
        )
        self._client = httpx.AsyncClient(transport=transport, timeout=timeout, limits=limits, trust_env=False)
        self._fleet = Fleet(failure_threshold=config.failure_threshold, success_threshold=config.success_threshold)
        self._monitor = HealthMonitor(self._fleet, self._client, config)
        self._proxy = Proxy(self._fleet, POLICIES[config.policy](config, clock), self._client, config)
        self.app = Starlette(
            routes=[*self._management(), *self._proxied()],
            lifespan=self._lifespan,
            exception_handlers={
                HTTPException: http_problem,
                ClientDisconnect: _client_gone,
                BodyTooLargeError: _too_large,
                Exception: internal_problem,
            },
        )
        self.app.state.fleet = self._fleet
        self.app.state.monitor = self._monitor

    def _management(self) -> list[Route]:
        guard = self._guarded
        return [
            Route("/workers", guard(self._add_worker), methods=["POST"]),
            Route("/workers", self._list_workers, methods=["GET"]),
            Route("/workers/{worker_id}", guard(self._delete_worker), methods=["DELETE"]),
            Route("/add_worker", guard(self._old_add), methods=["POST"]),
            Route("/remove_worker", guard(self._old_remove), methods=["POST"]),
            Route("/list_workers", self._old_list, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/engine_metrics", self._engine_metrics, methods=["GET"]),
            Route("/abort_request", guard(self._proxy.broadcast), methods=["POST"]),
        ]

    def _proxied(self) -> list[Route]:
        forward = self._proxy.forward
        return [
            Route("/generate", forward, methods=["POST"]),
            Route("/v1/{path:path}", forward, methods=["GET", "POST"]),
            Route("/model_info", forward, methods=["GET"]),
            Route("/get_model_info", forward, methods=["GET"]),
            Route("/health_generate", forward, methods=["GET"]),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for url in self._config.workers:
            self._fleet.add(check_url(url))
        await self._monitor.probe_all()
        watch = asyncio.create_task(self._monitor.watch())
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            await self._client.aclose()

    def _guarded(self, handler: Handler) -> Handler:
        if self._token is None:
            return handler
        expected = f"Bearer {self._token}".encode()

        async def guarded(request: Request) -> Response:
            if hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
                return await handler(request)
            return problem(401, "unauthorized", "this route needs the control token: send Authorization: Bearer …")

        return guarded

    async def _add_worker(self, request: Request) -> Response:
        try:
            body = await self._json_object(request)
            if body.get("worker_type", "regular") != "regular":
                return problem(
                    400, "worker_type_unknown", f"only 'regular' workers are served, not {body['worker_type']!r:.60}"
                )
            engine = await self._add(body.get("url"))
        except ValueError as error:
            return problem(400, "worker_url_invalid", str(error))
        return JSONResponse(engine.describe(), 201)

    async def _add(self, url: object) -> Engine:
        """Register and probe at once, so that an engine with the fleet's weights is routable when this returns."""
        engine = self._fleet.add(check_url(url))
        await self._monitor.probe(engine)
        return engine

    async def _list_workers(self, request: Request) -> Response:
        return JSONResponse({"workers": [engine.describe() for engine in self._fleet]})

    async def _delete_worker(self, request: Request) -> Response:
        return self._remove(self._fleet.by_id(request.path_params["worker_id"]), request.path_params["worker_id"])

    async def _old_add(self, request: Request) -> Response:
        try:
            engine = await self._add(await self._old_url(request))
        except ValueError as error:
            return problem(400, "worker_url_invalid", str(error))
        return JSONResponse({"status": "success", "worker_urls": self._urls(), "id": engine.worker_id})

    async def _old_remove(self, request: Request) -> Response:
        try:
            url = check_url(await self._old_url(request))
        except ValueError as error:
            return problem(400, "worker_url_invalid", str(error))
        return self._remove(self._fleet.by_url(url), url)

    def _remove(self, engine: Engine | None, name: str) -> Response:
        if engine is None:
            return problem(404, "no_such_worker", f"there is no worker {name}; there are {self._urls()}")
        self._fleet.remove(engine)
        return JSONResponse({"status": "success", "worker_urls": self._urls()})

    async def _old_list(self, request: Request) -> Response:
        return JSONResponse({"urls": self._urls()})

    async def _json_object(self, request: Request) -> dict[str, Any]:
        raw = await self._proxy.read(request)
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError(f"the body is {type(body).__name__}, not an object")
        return body

    async def _old_url(self, request: Request) -> object:
        """The URL from the query or the JSON body, as `url` or `worker_url`."""
        query = request.query_params
        found = query.get("url") or query.get("worker_url")
        if found:
            return found
        body = await self._json_object(request)
        return body.get("url") or body.get("worker_url")

    def _urls(self) -> list[str]:
        return [engine.url for engine in self._fleet]

    async def _health(self, request: Request) -> Response:
        routable = len(self._fleet.routable)
        body = {"status": "ok" if routable else "no routable worker", "workers": len(self._fleet), "routable": routable}
        return JSONResponse(body, 200 if routable else 503)

    async def _engine_metrics(self, request: Request) -> Response:
        engines = self._fleet.routable
        pages = await asyncio.gather(*(self._page(engine) for engine in engines))
        found = {engine.url: page for engine, page in zip(engines, pages, strict=True) if page is not None}
        return PlainTextResponse(merge_pages(found), media_type="text/plain; version=0.0.4")

    async def _page(self, engine: Engine) -> str | None:
        try:
            answer = await self._client.get(f"{engine.url}/metrics", timeout=self._config.health_timeout_s)
        except httpx.HTTPError:
            return None
        return answer.text if answer.is_success else None


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _too_large(request: Request, error: Exception) -> Response:
    return problem(413, "body_too_large", str(error))
