"""Replies of `/generate` as they go on the wire. Torch-free."""

from __future__ import annotations

import base64
from typing import Any

from miles_rollout.local.requests import EngineReply, EngineRequest
from miles_rollout.records import expert_digest, record_digest


def reply_json(request: EngineRequest, reply: EngineReply) -> dict[str, Any]:
    """Return a reply as it goes on the wire."""
    meta: dict[str, Any] = {
        "id": reply.rid,
        "finish_reason": _finish_json(reply),
        "prompt_tokens": len(reply.input_ids),
        "completion_tokens": len(reply.output_ids),
        "cached_tokens": reply.cached_tokens,
        "weight_version": str(reply.weight_version),
        "weight_version_spans": [list(span) for span in reply.weight_version_spans],
        "e2e_latency": reply.e2e_latency_s,
        "engine_id": reply.engine_id,
    }
    if request.return_logprob:
        logprobs = zip(reply.output_logprobs.tolist(), reply.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in logprobs]
        meta["record_digest"] = record_digest(reply.record)
    if reply.input_logprobs is not None:
        meta["input_token_logprobs"] = _input_logprobs_json(request, reply.input_logprobs.tolist())
    if reply.routed_experts is not None:
        meta["routed_experts"] = base64.b64encode(reply.routed_experts.astype("<i4").tobytes()).decode("ascii")
        meta["routed_experts_version_spans"] = [list(span) for span in reply.routed_experts_version_spans]
        meta["expert_digest"] = expert_digest(reply.record)
    return {"text": reply.text, "output_ids": list(reply.output_ids), "meta_info": meta}


def _finish_json(reply: EngineReply) -> dict[str, Any]:
    finish = reply.finish
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": len(reply.output_ids)}
    return {"type": "abort", "message": finish.message}


def _input_logprobs_json(request: EngineRequest, logprobs: list[float]) -> list[list[Any]]:
    ids = request.input_ids[request.logprob_start_len :]
    return [[logprob, token, None] for logprob, token in zip([None, *logprobs], ids, strict=False)]
