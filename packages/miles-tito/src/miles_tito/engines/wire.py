"""Bodies of `/generate`: from a request to JSON, and from JSON to a reply. The one place that knows the field names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from miles_tito.errors import EngineReplyError
from miles_tito.protocols import ExpertRows, FinishKind, FinishReason, GenerateReply, GenerateRequest, MoeInfo, Span
from miles_tito.records import expert_digest, record_digest

KNOWN_META = frozenset(
    [
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "weight_version",
        "weight_version_spans",
        "output_token_logprobs",
        "routed_experts",
        "routed_experts_shape",
        "routed_experts_version_spans",
        "record_digest",
        "expert_digest",
        "engine_id",
        "e2e_latency",
    ]
)


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """Body of `/generate`."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "n": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.sampling_seed is not None:
        params["sampling_seed"] = sampling.sampling_seed
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": list(request.input_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if request.want_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.expert_row_start}
    if request.expert_prefix is not None:
        body["routed_experts_prefix"] = encode_rows(request.expert_prefix)
    if request.extra_key is not None:
        body["extra_key"] = request.extra_key
    return body


def encode_rows(rows: NDArray[np.int32]) -> str:
    """Expert rows as the wire holds them: base64 of little-endian int32."""
    return base64.b64encode(rows.astype("<i4").tobytes()).decode("ascii")


def decode_reply(request: GenerateRequest, body: Mapping[str, Any], moe: MoeInfo | None = None) -> GenerateReply:
    """A reply from the body of `/generate`; `moe` gives the expert rows their shape. Raises `EngineReplyError` that
    names the field when one is missing or malformed."""
    meta = body.get("meta_info")
    if not isinstance(meta, Mapping):
        raise EngineReplyError("/generate: the engine's answer has no meta_info")
    output_ids, logprobs = _tokens(body, meta)
    version = version_number(meta.get("weight_version", 0))
    spans = _spans(meta, "weight_version_spans", version, len(output_ids))
    experts = _experts(request, meta, moe, version, len(output_ids))
    record, experts_record = meta.get("record_digest"), meta.get("expert_digest")
    computed = record_digest(request.input_ids, output_ids, logprobs, spans, experts)
    computed_experts = expert_digest(experts) if experts is not None else None
    latency = meta.get("e2e_latency")
    return GenerateReply(
        request_id=request.request_id,
        engine_id=str(meta.get("engine_id") or "unknown"),
        output_ids=output_ids,
        logprobs=logprobs,
        version_spans=spans,
        finish=_finish(meta.get("finish_reason")),
        prompt_tokens=integer(meta.get("prompt_tokens"), "prompt_tokens"),
        cached_tokens=integer(meta.get("cached_tokens") or 0, "cached_tokens"),
        record_digest=record if isinstance(record, str) else computed,
        expert_digest=experts_record if isinstance(experts_record, str) and experts is not None else computed_experts,
        experts=experts,
        latency_s=float(latency) if isinstance(latency, int | float) else None,
        unknown_fields=tuple(sorted(meta.keys() - KNOWN_META)),
    )


def version_number(label: object) -> int:
    """A version label as a number. A label that is no number (`default` of a fresh SGLang) is the boot checkpoint,
    0."""
    if type(label) is int:
        return label
    return int(label) if isinstance(label, str) and label.isascii() and label.isdecimal() else 0


def integer(value: object, field: str) -> int:
    """`value` when it is an integer, else an `EngineReplyError` that names the field."""
    if type(value) is not int:
        raise EngineReplyError(f"the engine's answer has {field} = {value!r}, expected an integer")
    return value


def _tokens(
    body: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[tuple[int, ...], np.ndarray[Any, np.dtype[np.float32]]]:
    """Output ids and float32 log-probabilities, from entries of (logprob, id) or (logprob, id, text)."""
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise EngineReplyError(
            "/generate: meta_info.output_token_logprobs is missing: the engine must return log-probabilities"
        )
    ids = []
    values = []
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) in (2, 3) and isinstance(entry[0], int | float)):
            raise EngineReplyError(f"/generate: output_token_logprobs holds {entry!r}, expected [logprob, id, text]")
        values.append(entry[0])
        ids.append(integer(entry[1], "output_token_logprobs[…][1]"))
    stated = body.get("output_ids")
    if stated is not None and list(stated) != ids:
        raise EngineReplyError(
            f"/generate: output_ids ({len(stated)} ids) are not the ids of output_token_logprobs ({len(ids)} ids)"
        )
    count = integer(meta.get("completion_tokens"), "completion_tokens")
    if count != len(ids):
        raise EngineReplyError(f"/generate: completion_tokens is {count}, but there are {len(ids)} output ids")
    logprobs = np.asarray(values, dtype=np.float32)
    if np.isnan(logprobs).any():
        raise EngineReplyError("/generate: output_token_logprobs holds NaN")
    return tuple(ids), logprobs


def _spans(meta: Mapping[str, Any], field: str, version: int, length: int) -> tuple[Span, ...]:
    spans = meta.get(field)
    if spans is None:
        return ((0, version),) if length else ()
    if not isinstance(spans, list) or not all(isinstance(span, list) and len(span) == 2 for span in spans):
        raise EngineReplyError(f"/generate: {field} is {spans!r}, expected [[start, version], …]")
    return tuple((integer(start, field), integer(label, field)) for start, label in spans)


def _experts(
    request: GenerateRequest, meta: Mapping[str, Any], moe: MoeInfo | None, version: int, n_output: int
) -> ExpertRows | None:
    """Expert rows from base64 of little-endian int32 [rows, layers, top_k]."""
    text = meta.get("routed_experts")
    if not request.want_experts or text is None:
        return None
    n_rows = max(len(request.input_ids) + n_output - 1 - request.expert_row_start, 0)
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError, TypeError) as error:
        raise EngineReplyError(f"/generate: routed_experts is not base64 of int32: {error}") from error
    layers, top_k = _expert_shape(moe, n_rows, len(flat))
    rows = flat.reshape(n_rows, layers, top_k).astype(np.int32)
    spans = _spans(meta, "routed_experts_version_spans", version, n_rows)
    return ExpertRows(rows, request.expert_row_start, spans)


def _expert_shape(moe: MoeInfo | None, n_rows: int, size: int) -> tuple[int, int]:
    if moe is None:
        raise EngineReplyError(
            "/generate: routed experts came, but /model_info has no moe section that gives their shape"
        )
    layers, top_k = len(moe.layers), moe.top_k
    if size != n_rows * layers * top_k:
        raise EngineReplyError(
            f"/generate: routed_experts holds {size} numbers, expected {n_rows} rows of {layers} layers and {top_k} "
            "experts"
        )
    return layers, top_k


def _finish(reason: object) -> FinishReason:
    if not isinstance(reason, Mapping) or reason.get("type") not in ("stop", "length", "abort", "tool_calls"):
        raise EngineReplyError(
            f"/generate: finish_reason is {reason!r}, expected an object with type stop, length or abort"
        )
    kind = "stop" if reason["type"] == "tool_calls" else reason["type"]
    matched, message = reason.get("matched"), reason.get("message")
    return FinishReason(
        cast("FinishKind", kind),
        matched if isinstance(matched, int | str) else None,
        message if isinstance(message, str) else None,
    )
