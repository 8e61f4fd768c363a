"""What requests may carry. Fields of SGLang that this engine does not serve are refused unless neutral."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from miles_rollout.local.errors import BodyTooLargeError, RequestError
from miles_rollout.local.requests import EngineRequest, SamplingParams
from miles_rollout.local.routes import RouteLayout, decode_routes

MAX_BODY_BYTES = 64 << 20
MAX_VERSION_DIGITS = 18
"""Versions are int64 wherever they are stored."""

_NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "custom_params": None,
    "ebnf": None,
    "frequency_penalty": 0,
    "json_schema": None,
    "logit_bias": None,
    "min_new_tokens": 0,
    "min_p": 0,
    "n": 1,
    "presence_penalty": 0,
    "regex": None,
    "repetition_penalty": 1,
    "stop_regex": None,
    "structural_tag": None,
}
_NEUTRAL_GENERATE: Mapping[str, Any] = {
    "audio_data": None,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "custom_logit_processor": None,
    "data_parallel_rank": None,
    "image_data": None,
    "input_embeds": None,
    "lora_id": None,
    "lora_path": None,
    "priority": None,
    "return_hidden_states": False,
    "return_indexer_topk": False,
    "return_text_in_logprobs": False,
    "routed_dp_rank": None,
    "session_params": None,
    "stream": False,
    "text": None,
    "token_ids_logprob": None,
    "top_logprobs_num": 0,
    "video_data": None,
}
_NEUTRAL_DISK: Mapping[str, Any] = {
    "is_async": False,
    "load_format": None,
    "manifest": None,
    "recapture_cuda_graph": False,
    "token_step": 0,
}
_NEUTRAL_DISTRIBUTED: Mapping[str, Any] = {"load_format": None, "selector": None, "torch_empty_cache": None}


class Body(BaseModel):
    """A request body. Extra fields are looked up in the table of neutral values."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class SamplingBody(Body):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None


class GenerateBody(Body):
    input_ids: list[int]
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    routed_experts_prefix: str | None = None
    rid: str | None = None
    extra_key: str | None = None
    log_metrics: bool = True


class AbortBody(Body):
    rid: str = ""
    abort_all: bool = False


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class VersionBody(Body):
    new_version: str
    abort_all_requests: bool = False


class DiskBody(Body):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    abort_all_requests: bool = False


class GroupBody(Body):
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class GroupNameBody(Body):
    group_name: str = "weight_update_group"


class DistributedBody(Body):
    names: list[str] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


_NEUTRAL: Mapping[type[Body], Mapping[str, Any]] = {
    SamplingBody: _NEUTRAL_SAMPLING,
    GenerateBody: _NEUTRAL_GENERATE,
    DiskBody: _NEUTRAL_DISK,
    DistributedBody: _NEUTRAL_DISTRIBUTED,
}
B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B]) -> B:
    """Read and check a JSON body. Raises `RequestError` with what is wrong and where, `BodyTooLargeError`."""
    raw = await _read_limited(request)
    try:
        document = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if b"\\u" in raw:
        _require_text(document)
    try:
        body = kind.model_validate(document)
    except ValidationError as error:
        raise RequestError(_explain(error, document), code=_code(document)) from error
    _check_extra(body)
    return body


def engine_request(body: GenerateBody, layout: RouteLayout) -> EngineRequest:
    """Return the engine's own form of a generate body. `layout` gives carried expert rows their shape."""
    _check_extra(body.sampling_params)
    s = body.sampling_params
    stop = (s.stop,) if isinstance(s.stop, str) else tuple(s.stop or ())
    sampling = SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        max_new_tokens=s.max_new_tokens,
        stop=stop,
        stop_token_ids=tuple(s.stop_token_ids or ()),
        ignore_eos=s.ignore_eos,
        no_stop_trim=s.no_stop_trim,
        skip_special_tokens=s.skip_special_tokens,
        sampling_seed=s.sampling_seed,
    )
    return EngineRequest(
        input_ids=tuple(body.input_ids),
        sampling=sampling,
        rid=body.rid or "",
        return_logprob=body.return_logprob,
        logprob_start_len=body.logprob_start_len,
        return_routed_experts=body.return_routed_experts,
        routed_experts_start_len=body.routed_experts_start_len,
        routed_experts_prefix=_prefix(body, layout),
        extra_key=body.extra_key,
    )


def _prefix(body: GenerateBody, layout: RouteLayout) -> NDArray[np.int32] | None:
    text = body.routed_experts_prefix
    return None if text is None else decode_routes(text, body.routed_experts_start_len, layout)


def version_number(text: str) -> int:
    """Parse a decimal version label. Raises `RequestError`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_VERSION_DIGITS):
        raise RequestError(
            f"weight version {text!r:.40} is not a decimal integer of at most {MAX_VERSION_DIGITS} digits",
            code="invalid_version",
        )
    return int(text)


async def _read_limited(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _require_text(document: Any) -> None:
    """An escaped lone surrogate is legal JSON but no text: it could not be sent back or name a file."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the body holds a lone surrogate ({error.object[error.start]!a}), which is not text",
            code="invalid_unicode",
        ) from error


def _check_extra(body: Body) -> None:
    neutral = _NEUTRAL.get(type(body), {})
    for name, value in (body.model_extra or {}).items():
        if name not in neutral:
            raise RequestError(f"there is no field {name!r}", code="unknown_field")
        if value is not None and value != neutral[name]:
            raise RequestError(
                f"field {name!r} is not served by this engine (value {value!r:.100})", code="unsupported_field"
            )


def _code(document: Any) -> str:
    asks_for_text = isinstance(document, dict) and "text" in document and "input_ids" not in document
    return "unsupported_field" if asks_for_text else "invalid_field"


def _explain(error: ValidationError, document: Any) -> str:
    if _code(document) == "unsupported_field":
        return "field 'text' is not served by this engine: send input_ids, so that nothing is tokenised twice"
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    return f"{where}: {first['msg']} (value {first['input']!r:.100})"
