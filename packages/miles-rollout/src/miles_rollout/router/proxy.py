"""Passing requests on: bodies untouched, answers streamed, connection failures taken to another engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from miles_rollout.config import RouterConfig
from miles_rollout.router.fleet import Engine, Fleet
from miles_rollout.router.policies import Policy
from miles_rollout.server.problems import problem

logger = logging.getLogger(__name__)

KEY_HEADER = "x-smg-routing-key"
TARGET_HEADER = "x-smg-target-worker"
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host"}
)
_NO_ANSWER = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class BodyTooLargeError(Exception):
    """The request's body is over the limit."""


class Proxy:
    """Chooses an engine for each request and passes it on."""

    def __init__(self, fleet: Fleet, policy: Policy, client: httpx.AsyncClient, config: RouterConfig) -> None:
        self._fleet = fleet
        self._policy = policy
        self._client = client
        self._config = config

    async def forward(self, request: Request) -> Response:
        """The engine's answer, or a problem: 400 (no key), 502 and 504 (no answer), 503 (no engine)."""
        key = request.headers.get(KEY_HEADER)
        if key is None and self._policy.needs_key and request.method == "POST" and TARGET_HEADER not in request.headers:
            return problem(400, "routing_key_missing", f"the policy routes by session: send the header {KEY_HEADER}")
        body = await self.read(request)
        return await self._until_gone(request, self._try_engines(request, body, key))

    async def broadcast(self, request: Request) -> Response:
        """Pass a request on to every engine, quarantined ones too; the first answer that is no success wins."""
        body = await self.read(request)
        engines = list(self._fleet)
        if not engines:
            return _no_engine(self._fleet)
        answers = await asyncio.gather(*(self._ask(engine, request, body) for engine in engines))
        answered = [answer for answer in answers if answer is not None]
        if not answered:
            return problem(502, "no_engine_answered", f"none of {len(engines)} engines answered {request.url.path}")
        answer = next((answer for answer in answered if not answer.is_success), answered[0])
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _ask(self, engine: Engine, request: Request, body: bytes) -> httpx.Response | None:
        try:
            return await self._client.send(self._outgoing(engine, request, body))
        except httpx.TransportError as error:
            logger.warning("engine %s did not answer %s: %r", engine.url, request.url.path, error)
            return None

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises `BodyTooLargeError`."""
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._config.max_request_bytes:
                raise BodyTooLargeError(f"a body may have {self._config.max_request_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _until_gone(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """Work until there is an answer or the client has gone: then the engine's work is cancelled too."""
        answer = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ClientDisconnect
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _try_engines(self, request: Request, body: bytes, key: str | None) -> Response:
        target = request.headers.get(TARGET_HEADER)
        if target is not None:
            return await self._to_target(request, body, target)
        tried: list[Engine] = []
        while len(tried) <= self._config.failover_tries:
            engines = self._fleet.routable
            if not engines:
                return _unanswered(tried) if tried else _no_engine(self._fleet)
            fresh = [engine for engine in engines if engine not in tried]
            if not fresh:
                await asyncio.sleep(self._config.failover_pause_s)
            engine = self._policy.choose(fresh or engines, key)
            tried.append(engine)
            answer = await self._send(engine, request, body)
            if answer is not None:
                return answer
        return _unanswered(tried)

    async def _to_target(self, request: Request, body: bytes, target: str) -> Response:
        engines = list(self._fleet)
        known = {str(index): engine for index, engine in enumerate(engines)}
        if target not in known:
            detail = f"{TARGET_HEADER} is {target!r:.60}; there are {len(engines)} workers"
            return problem(400, "no_such_worker", detail)
        engine = known[target]
        if not engine.healthy:
            return problem(
                503, "worker_not_routable", f"worker {target} ({engine.url}) is not routable: {engine.reason}"
            )
        answer = await self._send(engine, request, body)
        return answer if answer is not None else _unanswered([engine])

    async def _send(self, engine: Engine, request: Request, body: bytes) -> Response | None:
        """The answer of one engine; None when it gave none and another may be tried."""
        engine.load += 1
        relay: _Relay | None = None
        try:
            answer = await self._client.send(self._outgoing(engine, request, body), stream=True)
            engine.failures = 0
            relay = _Relay(engine, answer)
        except _NO_ANSWER as error:
            self._fleet.record_failure(engine, f"{type(error).__name__}: {error}")
            logger.warning("engine %s did not answer %s: %r", engine.url, request.url.path, error)
        except httpx.TimeoutException:
            limit = self._config.request_timeout_s
            return problem(504, "engine_timeout", f"engine {engine.url} was silent for {limit} s")
        finally:
            if relay is None:
                engine.load -= 1
        return relay

    def _outgoing(self, engine: Engine, request: Request, body: bytes) -> httpx.Request:
        query = f"?{request.url.query}" if request.url.query else ""
        path = request.scope.get("raw_path") or request.url.path.encode()
        url = f"{engine.url}{path.decode('ascii')}{query}"
        return self._client.build_request(request.method, url, content=body, headers=_passed_on(request.headers))


class _Relay(StreamingResponse):
    """An engine's answer on its way to the client; the engine's load falls when it has ended, however it ends."""

    def __init__(self, engine: Engine, answer: httpx.Response) -> None:
        self._engine = engine
        self._answer = answer
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        super().__init__(answer.aiter_raw(), answer.status_code, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._engine.load -= 1
            await self._answer.aclose()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _passed_on(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """The client's headers, byte for byte; the client library sets the length again from the same bytes."""
    dropped = _HOP_BY_HOP | {"content-length", TARGET_HEADER}
    kept = {name: value for name, value in headers.items() if name.lower() not in dropped}
    return {name.encode("latin-1"): value.encode("latin-1") for name, value in kept.items()}


def _no_engine(fleet: Fleet) -> Response:
    reasons = "; ".join(f"{engine.url}: {engine.reason}" for engine in fleet)
    detail = f"none of {len(fleet)} workers is routable ({reasons})" if len(fleet) else "no worker is registered"
    return problem(503, "no_worker", detail, headers={"Retry-After": "1"})


def _unanswered(tried: list[Engine]) -> Response:
    names = ", ".join(engine.url for engine in tried)
    return problem(502, "no_engine_answered", f"no answer from {names}")
