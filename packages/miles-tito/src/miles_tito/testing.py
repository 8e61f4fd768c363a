"""Fakes for tests, of this package and of others: an in-process engine, and the same engine behind the HTTP API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .engines.wire import encode_rows
from .errors import EngineReplyError, EngineStatusError
from .protocols import (
    EngineInfo,
    ExpertRows,
    FinishKind,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MoeInfo,
    SamplingParams,
    Span,
)
from .records import expert_digest, record_digest

Fault = Literal["slow", "malformed", "prompt_length", "wrong_digest", "wrong_expert_digest"]


@dataclass(frozen=True, slots=True)
class StubReply:
    """One scripted answer. `status` >= 400 makes it an error; `versions` gives one version for each output id."""

    output_ids: Sequence[int] = ()
    finish: FinishKind = "stop"
    matched: int | str | None = None
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    status: int = 200
    fault: Fault | None = None


class StubEngine:
    """A `TokenEngine` in this process. It plays `script`, then hashed replies that end with `stop_id`.

    Every call is kept in `requests`, every abort in `aborted`. A reply with fault "slow" waits until `gate` is set;
    `entered` is set when such a call has begun. `version` labels the tokens unless a reply says otherwise.
    """

    def __init__(
        self,
        script: Sequence[StubReply] = (),
        *,
        stop_id: int = 0,
        vocab_size: int = 256,
        version: int = 0,
        engine_id: str = "stub:0",
        moe: MoeInfo | None = None,
        max_context: int | None = None,
    ) -> None:
        self.script = list(script)
        self.stop_id = stop_id
        self.vocab_size = vocab_size
        self.version = version
        self.engine_id = engine_id
        self.moe = moe
        self.max_context = max_context
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.open = True

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Answer with the next scripted or hashed reply."""
        self.requests.append(request)
        scripted = self.script.pop(0) if self.script else self._hashed(request)
        if scripted.fault == "slow":
            self.entered.set()
            await self.gate.wait()
        if scripted.status >= 400:
            raise EngineStatusError(f"the stub engine answers {scripted.status}", status=scripted.status)
        if scripted.fault == "malformed":
            raise EngineReplyError("the stub engine answers with something that is no reply")
        return self._reply(request, scripted)

    async def abort(self, request_id: str) -> None:
        """Note the abort."""
        self.aborted.append(request_id)

    async def describe(self) -> EngineInfo:
        """What the engine says of itself."""
        return EngineInfo(self.engine_id, "stub", self.version, self.moe, self.max_context)

    async def aclose(self) -> None:
        """Note that the engine was released."""
        self.open = False

    def _hashed(self, request: GenerateRequest) -> StubReply:
        """A reply that depends on the input and the seed only: a few ids, then the stop id."""
        digest = hashlib.sha256(repr((list(request.input_ids), request.sampling.sampling_seed)).encode()).digest()
        count = min(1 + digest[0] % 6, max(request.sampling.max_new_tokens - 1, 0))
        ids = [byte % self.vocab_size for byte in digest[1 : 1 + count]]
        return StubReply([*ids, self.stop_id], matched=self.stop_id)

    def _reply(self, request: GenerateRequest, scripted: StubReply) -> GenerateReply:
        ids = tuple(scripted.output_ids)
        given = scripted.logprobs
        logprobs = np.asarray(
            given if given is not None else [-0.5 - 0.25 * (i % 4) for i in range(len(ids))], np.float32
        )
        spans = _spans(scripted.versions if scripted.versions is not None else [self.version] * len(ids))
        experts = self._experts(request, ids) if request.want_experts and self.moe else None
        record = record_digest(request.input_ids, ids, logprobs, spans, experts)
        experts_record = expert_digest(experts) if experts is not None else None
        flipped = "0" * 32
        return GenerateReply(
            request_id=request.request_id,
            engine_id=self.engine_id,
            output_ids=ids,
            logprobs=logprobs,
            version_spans=spans,
            finish=FinishReason(scripted.finish, scripted.matched),
            prompt_tokens=len(request.input_ids) + (scripted.fault == "prompt_length"),
            cached_tokens=0,
            record_digest=flipped if scripted.fault in ("wrong_digest", "wrong_expert_digest") else record,
            expert_digest=flipped if scripted.fault == "wrong_expert_digest" else experts_record,
            experts=experts,
        )

    def _experts(self, request: GenerateRequest, ids: Sequence[int]) -> ExpertRows:
        """Routes that depend on the token and its position, so that a shifted row is seen."""
        assert self.moe is not None
        tokens = np.asarray([*request.input_ids, *ids][:-1], np.int64)
        rows = stub_routes(tokens, self.moe)[request.expert_row_start :]
        spans: tuple[Span, ...] = ((0, self.version),) if len(rows) else ()
        return ExpertRows(rows, request.expert_row_start, spans)


def stub_routes(tokens: NDArray[np.int64], moe: MoeInfo) -> NDArray[np.int32]:
    """Routes of the stub engine: int32 [T, L, K]."""
    position = np.arange(len(tokens))[:, None, None]
    layer = np.arange(len(moe.layers))[None, :, None]
    rank = np.arange(moe.top_k)[None, None, :]
    return ((tokens[:, None, None] * 7 + position * 3 + layer * 5 + rank) % moe.num_experts).astype(np.int32)


def _spans(versions: Sequence[int]) -> tuple[Span, ...]:
    return tuple((i, version) for i, version in enumerate(versions) if i == 0 or version != versions[i - 1])


@dataclass(frozen=True, slots=True)
class WireFaults:
    """What the HTTP stub does wrong before it answers properly: `statuses` are answered first, one a call.

    `edit_meta` and `edit_body` overwrite fields of every reply (None removes a field); `stock` drops our extensions.
    """

    statuses: tuple[int, ...] = ()
    edit_meta: Mapping[str, Any] | None = None
    edit_body: Mapping[str, Any] | None = None
    stock: bool = False
    body: bytes | None = None


_EXTENSIONS = ("weight_version_spans", "routed_experts_version_spans", "record_digest", "expert_digest", "engine_id")


def stub_engine_app(engine: StubEngine, faults: WireFaults | None = None) -> Starlette:
    """The engine API over `engine`. Bodies and headers of `/generate` are kept in `app.state.calls`."""
    wire = _WireStub(engine, faults or WireFaults())
    app = Starlette(
        routes=[
            Route("/generate", wire.generate, methods=["POST"]),
            Route("/abort_request", wire.abort, methods=["POST"]),
            Route("/get_model_info" if wire.faults.stock else "/model_info", wire.model_info),
            Route("/health", wire.health),
        ]
    )
    app.state.calls = wire.calls
    return app


class _WireStub:
    def __init__(self, engine: StubEngine, faults: WireFaults) -> None:
        self.engine = engine
        self.faults = faults
        self.statuses = list(faults.statuses)
        self.calls: list[tuple[dict[str, Any], dict[str, str]]] = []

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((body, dict(request.headers)))
        if self.statuses:
            status = self.statuses.pop(0)
            return JSONResponse({"title": "stub", "code": "stub_fault", "detail": "as asked", "status": status}, status)
        if self.faults.body is not None:
            return Response(self.faults.body, media_type="application/json")
        try:
            reply = await self.engine.generate(
                _request(body, request.headers.get("x-smg-routing-key", ""), self.engine.moe)
            )
        except EngineStatusError as error:
            return JSONResponse({"code": error.code, "detail": str(error)}, error.status)
        return JSONResponse(self._encode(reply))

    async def abort(self, request: Request) -> Response:
        await self.engine.abort((await request.json())["rid"])
        return JSONResponse({})

    async def model_info(self, request: Request) -> Response:
        info = await self.engine.describe()
        if self.faults.stock:
            return JSONResponse({"model_path": info.model_path, "weight_version": "default"})
        moe = info.moe and {
            "layers": list(info.moe.layers),
            "num_experts": info.moe.num_experts,
            "top_k": info.moe.top_k,
            "replays_routes": info.moe.replays_routes,
        }
        body = {"model_path": info.model_path, "weight_version": str(info.weight_version), "engine_id": info.engine_id}
        optional = {"moe": moe, "max_context": info.max_context}
        return JSONResponse(body | {name: value for name, value in optional.items() if value is not None})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def _encode(self, reply: GenerateReply) -> dict[str, Any]:
        body = encode_reply(reply)
        if self.faults.stock:
            body["meta_info"]["weight_version"] = "default"
            for field in _EXTENSIONS:
                body["meta_info"].pop(field, None)
        _edit(body["meta_info"], self.faults.edit_meta)
        _edit(body, self.faults.edit_body)
        return body


def _edit(target: dict[str, Any], edits: Mapping[str, Any] | None) -> None:
    for key, value in (edits or {}).items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


def _prefix(body: Mapping[str, Any], moe: MoeInfo | None) -> NDArray[np.int32] | None:
    text = body.get("routed_experts_prefix")
    if text is None or moe is None:
        return None
    flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    return flat.reshape(body["routed_experts_start_len"], len(moe.layers), moe.top_k).astype(np.int32)


def _request(body: Mapping[str, Any], session_key: str, moe: MoeInfo | None) -> GenerateRequest:
    known = {name: value for name, value in body["sampling_params"].items() if name in SamplingParams.__slots__}
    params: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
    sampling = SamplingParams(**params)
    return GenerateRequest(
        request_id=body["rid"],
        session_key=session_key,
        input_ids=body["input_ids"],
        sampling=sampling,
        want_experts=body.get("return_routed_experts", False),
        expert_row_start=body.get("routed_experts_start_len", 0),
        expert_prefix=_prefix(body, moe),
        extra_key=body.get("extra_key"),
    )


def encode_reply(reply: GenerateReply) -> dict[str, Any]:
    """A reply as the engine API writes it."""
    finish: dict[str, Any] = {"type": reply.finish.kind}
    finish |= {} if reply.finish.matched is None else {"matched": reply.finish.matched}
    finish |= {"length": len(reply.output_ids)} if reply.finish.kind == "length" else {}
    meta: dict[str, Any] = {
        "id": reply.request_id,
        "finish_reason": finish,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": len(reply.output_ids),
        "cached_tokens": reply.cached_tokens,
        "weight_version": str(reply.version_spans[-1][1]) if reply.version_spans else "0",
        "weight_version_spans": [list(span) for span in reply.version_spans],
        "output_token_logprobs": [
            [float(logprob), token, None] for logprob, token in zip(reply.logprobs, reply.output_ids, strict=True)
        ],
        "record_digest": reply.record_digest,
        "engine_id": reply.engine_id,
        "e2e_latency": 0.001,
    }
    if reply.experts is not None:
        meta |= {
            "routed_experts": encode_rows(reply.experts.rows),
            "routed_experts_version_spans": [list(span) for span in reply.experts.version_spans],
            "expert_digest": reply.expert_digest,
        }
    return {"text": "", "output_ids": list(reply.output_ids), "meta_info": meta}
