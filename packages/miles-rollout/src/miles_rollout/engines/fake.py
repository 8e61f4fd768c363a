"""An engine without a model: tokens are hashes of the input, faults are injected. Torch-free, for tests of its clients.

engine = FakeEngine()
engine.inject("wrong_digest")              # the next request only
transport = httpx.ASGITransport(engine.app)
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from miles_rollout.local.errors import EngineError, EnginePoisonedError, RequestError
from miles_rollout.local.requests import EngineReply, EngineRequest, FinishReason, RequestLimits, check_request
from miles_rollout.local.routes import RouteLayout
from miles_rollout.protocols import PauseMode
from miles_rollout.server.bodies import (
    AbortBody,
    Body,
    DiskBody,
    GenerateBody,
    PauseBody,
    VersionBody,
    engine_request,
    read_body,
    version_number,
)
from miles_rollout.server.problems import engine_problem, http_problem, problem
from miles_rollout.server.replies import reply_json

Fault = Literal["error_500", "error_503", "drop", "hang", "malformed", "wrong_digest", "wrong_ids", "wrong_version"]
"""error_*: that status · drop: the connection breaks inside the reply · hang: no reply until released ·
malformed: no JSON · wrong_digest: another record digest · wrong_ids: an output id changed after the digest ·
wrong_version: label + 7."""

_WRONG_DIGEST = "0" * 32
_ROUTES = RouteLayout(layers=(0, 1), num_experts=8, top_k=2)


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    aborted: bool = False
    output: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class FakeEngine:
    """Speaks the engine API over ASGI (`app`). All state may be read and set by the test."""

    def __init__(
        self, *, engine_id: str = "fake:1", version: int = 0, vocab_size: int = 512, max_context: int = 4096
    ) -> None:
        self.engine_id = engine_id
        self.version = version
        self.healthy = True
        self.poisoned = False
        self.paused: PauseMode | None = None
        self.delay_s = 0.0
        self.received: list[EngineRequest] = []
        self.calls: list[str] = []
        self._limits = RequestLimits(vocab_size, max_context, has_tokenizer=True, routes=_ROUTES)
        self._faults: deque[Fault] = deque()
        self._running: list[_Running] = []
        self._changed = asyncio.Condition()
        self._released = False
        self.app = self._build()

    def inject(self, fault: Fault, times: int = 1) -> None:
        """Let the next `times` generate requests meet `fault`."""
        self._faults.extend([fault] * times)

    async def release(self) -> None:
        """Let requests that hang go on."""
        self._released = True
        await self._notify()

    @property
    def running(self) -> int:
        return len(self._running)

    def token(self, request: EngineRequest, index: int) -> int:
        """Return output `index` of a request: a hash of its input, seed and index."""
        parts = struct.pack(f"<{len(request.input_ids)}i", *request.input_ids)
        seed = request.sampling.sampling_seed or 0
        return xxhash.xxh3_64_intdigest(parts + struct.pack("<Qi", seed, index)) % self._limits.vocab_size

    def _build(self) -> Starlette:
        post = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weight_version": self._set_version,
            "/update_weights_from_disk": self._from_disk,
        }
        get = {
            "/health": self._health,
            "/health_generate": self._health,
            "/model_info": self._model_info,
            "/metrics": self._metrics,
            "/flush_cache": self._flush,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in post.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
        return Starlette(routes=routes, exception_handlers={EngineError: engine_problem, HTTPException: http_problem})

    async def _generate(self, request: Request) -> Response:
        self.calls.append("generate")
        if self.poisoned:
            raise EnginePoisonedError(f"engine {self.engine_id} is poisoned: install a whole set of weights")
        wanted = engine_request(await read_body(request, GenerateBody), _ROUTES)
        check_request(wanted, self._limits)
        self.received.append(wanted)
        fault = self._faults.popleft() if self._faults else None
        early = await self._early_fault(fault)
        if early is not None:
            return early
        return _late_fault(fault, reply_json(wanted, await self._run(wanted)))

    async def _early_fault(self, fault: Fault | None) -> Response | None:
        if fault in ("error_500", "error_503"):
            return problem(int(fault.removeprefix("error_")), "injected", "a fault was injected")
        if fault == "malformed":
            return PlainTextResponse("{not json", media_type="application/json")
        if fault == "drop":
            return _DroppedResponse()
        if fault == "hang":
            async with self._changed:
                await self._changed.wait_for(lambda: self._released)
        return None

    async def _run(self, request: EngineRequest) -> EngineReply:
        state = _Running(request)
        self._running.append(state)
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            while len(state.output) < request.sampling.max_new_tokens and not state.aborted:
                await self._one_token(state)
        finally:
            self._running.remove(state)
        return self._reply(state)

    async def _one_token(self, state: _Running) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.paused is None or state.aborted)
        if not state.aborted:
            state.output.append(self.token(state.request, len(state.output)))
            state.versions.append(self.version)
        await asyncio.sleep(0)

    def _reply(self, state: _Running) -> EngineReply:
        request, n = state.request, len(state.output)
        start, rows = request.routed_experts_start_len, None
        if request.return_routed_experts:
            n_rows = max(len(request.input_ids) + n - 1 - start, 0)
            shape = (n_rows, len(_ROUTES.layers), _ROUTES.top_k)
            rows = (np.arange(np.prod(shape), dtype=np.int32) % _ROUTES.num_experts).reshape(shape)
        spans = tuple((i, v) for i, v in enumerate(state.versions) if i == 0 or v != state.versions[i - 1])
        return EngineReply(
            rid=request.rid or f"fake-{len(self.received)}",
            engine_id=self.engine_id,
            input_ids=request.input_ids,
            output_ids=tuple(state.output),
            output_logprobs=np.arange(-1, -n - 1, -1, dtype=np.float32),
            finish=FinishReason("abort", message="aborted") if state.aborted else FinishReason("length"),
            cached_tokens=0,
            weight_version=state.versions[-1] if state.versions else self.version,
            weight_version_spans=spans,
            routed_experts=rows,
            routed_experts_start=start if rows is not None else 0,
            routed_experts_version_spans=((0, self.version),) if rows is not None and len(rows) else (),
            input_logprobs=None,
            text="",
            e2e_latency_s=self.delay_s,
        )

    async def _abort(self, request: Request) -> Response:
        self.calls.append("abort")
        body = await read_body(request, AbortBody)
        for state in self._running:
            state.aborted = state.aborted or body.abort_all or state.request.rid.startswith(body.rid)
        await self._notify()
        return _success()

    async def _pause(self, request: Request) -> Response:
        body = await read_body(request, PauseBody)
        self.calls.append(f"pause:{body.mode}")
        self.paused = body.mode
        for state in self._running if body.mode == "abort" else []:
            state.aborted = True
        await self._notify()
        return _success()

    async def _continue(self, request: Request) -> Response:
        await read_body(request, Body)
        self.calls.append("continue")
        self.paused = None
        await self._notify()
        return _success()

    async def _flush(self, _request: Request) -> Response:
        self.calls.append("flush")
        if self._running and self.paused in (None, "in_place"):
            return problem(400, "engine_busy", f"{len(self._running)} requests are running")
        return PlainTextResponse("Cache flushed.\n")

    async def _set_version(self, request: Request) -> Response:
        body = await read_body(request, VersionBody)
        return self._take_version(version_number(body.new_version))

    async def _from_disk(self, request: Request) -> Response:
        body = await read_body(request, DiskBody)
        return self._take_version(
            self.version + 1 if body.weight_version is None else version_number(body.weight_version)
        )

    def _take_version(self, version: int) -> Response:
        self.calls.append(f"version:{version}")
        if version < self.version:
            raise RequestError(f"version {version} is below {self.version}", code="version_not_rising")
        self.version, self.poisoned = version, False
        return _success()

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("", 200 if self.healthy and not self.poisoned else 503)

    async def _model_info(self, _request: Request) -> Response:
        moe = {
            "layers": list(_ROUTES.layers),
            "num_experts": _ROUTES.num_experts,
            "top_k": _ROUTES.top_k,
            "replays_routes": True,
        }
        return JSONResponse(
            {"model_path": "fake", "weight_version": str(self.version), "engine_id": self.engine_id, "moe": moe}
        )

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(f"sglang:num_running_reqs {len(self._running)}\n")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _DroppedResponse(Response):
    """Begins a reply and breaks off."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"4096")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ConnectionResetError("a fault was injected: the reply was dropped")


def _late_fault(fault: Fault | None, reply: dict[str, Any]) -> Response:
    meta: dict[str, Any] = reply["meta_info"]
    if fault == "wrong_digest":
        meta["record_digest"] = _WRONG_DIGEST
    elif fault == "wrong_version":
        shifted = int(meta["weight_version"]) + 7
        meta |= {"weight_version": str(shifted), "weight_version_spans": [[0, shifted]]}
    elif fault == "wrong_ids" and reply["output_ids"]:
        changed = reply["output_ids"][0] ^ 1
        reply["output_ids"][0] = changed
        _replace_id(meta, changed)
    return JSONResponse(reply)


def _replace_id(meta: Mapping[str, Any], changed: int) -> None:
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"][0][1] = changed


def _success() -> Response:
    return JSONResponse({"success": True, "message": "ok"})
