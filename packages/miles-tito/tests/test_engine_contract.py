"""The generate client against the recorded requests and replies of `contracts/engine-api/v1`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from miles_tito import EngineInfo, EngineStatusError, GenerateReply, GenerateRequest, SamplingParams, SGLangEngine
from miles_tito.engines.wire import encode_request

CONTRACT = Path(__file__).resolve().parents[3] / "contracts" / "engine-api" / "v1"
EXCHANGES: list[dict[str, Any]] = json.loads((CONTRACT / "exchanges.json").read_text())["exchanges"]
MODEL_INFO = next(exchange for exchange in EXCHANGES if exchange["path"] == "/model_info")
GENERATED = [e for e in EXCHANGES if e["path"] == "/generate" and e["status"] == 200 and e["request"]["return_logprob"]]
REFUSED = [e for e in EXCHANGES if e["path"] == "/generate" and e["status"] >= 400 and "input_ids" in e["request"]]


def request_of(exchange: dict[str, Any]) -> GenerateRequest:
    body = exchange["request"]
    known = {name: value for name, value in body["sampling_params"].items() if name in SamplingParams.__slots__}
    sampling: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
    return GenerateRequest(
        body["rid"],
        "key",
        body["input_ids"],
        SamplingParams(**sampling),
        want_experts=body.get("return_routed_experts", False),
        expert_row_start=body.get("routed_experts_start_len", 0),
        extra_key=body.get("extra_key"),
        expert_prefix=prefix_of(body),
    )


def prefix_of(body: dict[str, Any]) -> NDArray[np.int32] | None:
    text, moe = body.get("routed_experts_prefix"), MODEL_INFO["reply"]["moe"]
    if text is None:
        return None
    flat = np.frombuffer(base64.b64decode(text), dtype="<i4")
    return flat.reshape(-1, len(moe["layers"]), moe["top_k"]).astype(np.int32)


def client_for(exchange: dict[str, Any]) -> SGLangEngine:
    def answer(request: httpx.Request) -> httpx.Response:
        found = MODEL_INFO if request.url.path == "/model_info" else exchange
        return httpx.Response(found["status"], json=found["reply"])

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return SGLangEngine("http://recorded", client=http, max_retries=0)


async def generate(exchange: dict[str, Any]) -> GenerateReply:
    client = client_for(exchange)
    try:
        return await client.generate(request_of(exchange))
    finally:
        await client.aclose()


@pytest.mark.parametrize("exchange", GENERATED, ids=lambda exchange: exchange["id"])
async def test_recorded_replies_are_read_and_their_digests_hold(exchange: dict[str, Any]) -> None:
    reply = await generate(exchange)
    meta = exchange["reply"]["meta_info"]
    assert list(reply.output_ids) == exchange["reply"]["output_ids"]
    assert (reply.record_digest, reply.expert_digest) == (meta["record_digest"], meta.get("expert_digest"))
    assert [list(span) for span in reply.version_spans] == meta["weight_version_spans"]
    assert (reply.engine_id, reply.cached_tokens) == (meta["engine_id"], meta["cached_tokens"])
    assert reply.finish.kind == meta["finish_reason"]["type"]
    assert (reply.experts is not None) == ("routed_experts" in meta)


@pytest.mark.parametrize("exchange", REFUSED, ids=lambda exchange: exchange["id"])
async def test_recorded_errors_keep_status_and_code(exchange: dict[str, Any]) -> None:
    with pytest.raises(EngineStatusError) as caught:
        await generate(exchange)
    assert (caught.value.status, caught.value.code) == (exchange["status"], exchange["reply"]["code"])


@pytest.mark.parametrize("exchange", GENERATED, ids=lambda exchange: exchange["id"])
def test_what_the_client_sends_fits_the_schema(exchange: dict[str, Any]) -> None:
    schema = json.loads((CONTRACT / "request.schema.json").read_text())
    sent = encode_request(request_of(exchange))
    jsonschema.validate(json.loads(json.dumps(sent)), schema)
    assert sent.get("routed_experts_prefix") == exchange["request"].get("routed_experts_prefix")


async def test_the_recorded_engine_describes_itself() -> None:
    client = client_for(MODEL_INFO)
    info = await client.describe()
    await client.aclose()
    assert isinstance(info, EngineInfo)
    assert (info.engine_id, info.weight_version) == (MODEL_INFO["reply"]["engine_id"], 0)
    assert info.moe is not None
    assert info.moe.top_k == MODEL_INFO["reply"]["moe"]["top_k"]
    assert info.moe.replays_routes
    assert info.max_context == MODEL_INFO["reply"]["max_context"]
