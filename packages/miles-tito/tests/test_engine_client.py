"""The client of the engine API, against the stub engine over HTTP."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from miles_tito import (
    EngineReplyError,
    EngineStatusError,
    EngineUnreachableError,
    ExpertIdentityError,
    GenerateRequest,
    MoeInfo,
    SamplingParams,
    SGLangEngine,
    TokenEngine,
    TokenIdentityError,
    record_digest,
)
from miles_tito.testing import StubEngine, StubReply, WireFaults, stub_engine_app

REQUEST = GenerateRequest("rid-1", "session-1", [5, 6, 7], SamplingParams(temperature=0.5, sampling_seed=2**62))
MOE = MoeInfo((1, 3), 300, 2)
MakeClient = Callable[..., SGLangEngine]


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    async with AsyncExitStack() as stack:

        def make(engine: StubEngine, faults: WireFaults | None = None, **options: Any) -> SGLangEngine:
            app = stub_engine_app(engine, faults)
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
            client = SGLangEngine("http://engine/", client=http, backoff_s=0.0, **options)
            stack.push_async_callback(client.aclose)
            client.calls = app.state.calls  # type: ignore[attr-defined]
            return client

        yield make


async def test_a_reply_crosses_the_wire_unchanged(make_client: MakeClient) -> None:
    script = [StubReply([9, 8, 0], matched=0, logprobs=[-0.1, -1e-7, -30.3], versions=[3, 3, 4])]
    engine = StubEngine(list(script))
    client = make_client(engine)
    assert isinstance(client, TokenEngine)
    found = await client.generate(REQUEST)
    expected = await StubEngine(list(script)).generate(REQUEST)
    assert found.output_ids == expected.output_ids
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()
    assert found.version_spans == ((0, 3), (2, 4))
    assert (found.record_digest, found.engine_id) == (expected.record_digest, "stub:0")
    assert (found.finish.kind, found.finish.matched) == ("stop", 0)
    assert found.unknown_fields == ()


async def test_the_request_is_sglangs(make_client: MakeClient) -> None:
    client = make_client(StubEngine())
    await client.generate(REQUEST)
    body, headers = client.calls[0]  # type: ignore[attr-defined]
    assert headers["x-smg-routing-key"] == "session-1"
    assert body["input_ids"] == [5, 6, 7]
    assert (body["rid"], body["return_logprob"], body["logprob_start_len"], body["stream"]) == (
        "rid-1",
        True,
        -1,
        False,
    )
    params = body["sampling_params"]
    assert (params["no_stop_trim"], params["skip_special_tokens"], params["n"]) == (True, False, 1)
    assert (params["temperature"], params["sampling_seed"]) == (0.5, 2**62)
    assert "return_routed_experts" not in body


async def test_expert_rows_cross_the_wire(make_client: MakeClient) -> None:
    engine = StubEngine([StubReply([9, 0], matched=0)], moe=MOE)
    client = make_client(engine)
    request = GenerateRequest("r", "s", [5, 6, 7], SamplingParams(), want_experts=True, expert_row_start=2)
    reply = await client.generate(request)
    expected = engine._experts(request, (9, 0))
    assert reply.experts is not None
    assert (reply.experts.rows == expected.rows).all()
    assert (reply.experts.row_start, reply.experts.version_spans) == (2, ((0, 0),))
    body, _ = client.calls[0]  # type: ignore[attr-defined]
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)


@pytest.mark.parametrize("replays", [True, False])
async def test_recorded_routes_are_sent_where_they_are_replayed(make_client: MakeClient, replays: bool) -> None:
    engine = StubEngine([StubReply([9, 0], matched=0)], moe=replace(MOE, replays_routes=replays))
    client = make_client(engine)
    prefix = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    request = GenerateRequest("r", "s", [5, 6, 7], SamplingParams(), True, 2, expert_prefix=prefix)
    await client.generate(request)
    body, _ = client.calls[0]  # type: ignore[attr-defined]
    assert ("routed_experts_prefix" in body) == replays
    (received,) = engine.requests
    if replays:
        assert body["routed_experts_prefix"] == base64.b64encode(prefix.astype("<i4").tobytes()).decode()
        np.testing.assert_array_equal(received.expert_prefix, prefix)
    else:
        assert received.expert_prefix is None


async def test_a_stock_engine_gets_its_digest_on_receipt(make_client: MakeClient) -> None:
    engine = StubEngine([StubReply([9, 0], matched=0)])
    client = make_client(engine, WireFaults(stock=True))
    info = await client.describe()
    assert (info.engine_id, info.weight_version, info.moe) == ("http://engine", 0, None)
    reply = await client.generate(REQUEST)
    assert reply.version_spans == ((0, 0),)
    assert reply.record_digest == record_digest([5, 6, 7], [9, 0], reply.logprobs, ((0, 0),))


async def test_a_version_label_is_a_number_or_the_boot_checkpoint(make_client: MakeClient) -> None:
    edits = {"weight_version": "12", "weight_version_spans": None, "record_digest": None}
    client = make_client(StubEngine([StubReply([9, 0])]), WireFaults(edit_meta=edits))
    assert (await client.generate(REQUEST)).version_spans == ((0, 12),)


async def test_describe_reads_the_moe_section(make_client: MakeClient) -> None:
    info = await make_client(StubEngine(moe=MOE, version=7)).describe()
    assert (info.engine_id, info.weight_version, info.moe) == ("stub:0", 7, MOE)


@pytest.mark.parametrize("fault", ["wrong_digest", "wrong_expert_digest"])
async def test_a_wrong_digest_is_an_identity_error(make_client: MakeClient, fault: Any) -> None:
    client = make_client(StubEngine([StubReply([9, 0], fault=fault)], moe=MOE))
    error = TokenIdentityError if fault == "wrong_digest" else ExpertIdentityError
    request = GenerateRequest("r", "s", [5], SamplingParams(), want_experts=True)
    with pytest.raises(error, match="request r"):
        await client.generate(request)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (WireFaults(edit_meta={"prompt_tokens": 4}), "consumed 4 prompt tokens of 3"),
        (WireFaults(edit_meta={"completion_tokens": 3}), "completion_tokens is 3"),
        (WireFaults(edit_meta={"output_token_logprobs": None}), "output_token_logprobs is missing"),
        (WireFaults(edit_meta={"output_token_logprobs": [[-1.0]]}), "expected \\[logprob"),
        (WireFaults(edit_meta={"output_token_logprobs": [[-1.0, "a"], [-1.0, 0]]}), "expected an integer"),
        (WireFaults(edit_body={"output_ids": [9, 1]}), "are not the ids"),
        (WireFaults(edit_meta={"finish_reason": None}), "finish_reason"),
        (WireFaults(edit_meta={"finish_reason": {"type": "bored"}}), "finish_reason"),
        (WireFaults(edit_meta={"weight_version_spans": [[1, 0]]}), "do not cover"),
        (WireFaults(edit_meta={"weight_version_spans": [[0, -2]]}), "negative version"),
        (WireFaults(edit_meta={"weight_version_spans": "x"}), "expected \\[\\[start"),
        (WireFaults(edit_body={"meta_info": None}), "no meta_info"),
        (WireFaults(body=b"[1]"), "not an object"),
        (WireFaults(body=b"{"), "not JSON"),
    ],
)
async def test_a_malformed_reply_is_refused(make_client: MakeClient, faults: WireFaults, message: str) -> None:
    client = make_client(StubEngine([StubReply([9, 0])]), faults)
    with pytest.raises(EngineReplyError, match=message):
        await client.generate(REQUEST)


@pytest.mark.parametrize("rows", ["!!", "AAAA", "AAAAAA=="])
async def test_malformed_expert_rows_are_refused(make_client: MakeClient, rows: str) -> None:
    client = make_client(StubEngine([StubReply([9, 0])], moe=MOE), WireFaults(edit_meta={"routed_experts": rows}))
    with pytest.raises(EngineReplyError, match="routed_experts"):
        await client.generate(GenerateRequest("r", "s", [5], SamplingParams(), want_experts=True))


async def test_ids_may_come_from_the_logprobs_alone(make_client: MakeClient) -> None:
    pairs = {"output_token_logprobs": [[-0.5, 9], [-0.75, 0]]}
    client = make_client(StubEngine([StubReply([9, 0])]), WireFaults(edit_meta=pairs, edit_body={"output_ids": None}))
    assert (await client.generate(REQUEST)).output_ids == (9, 0)


async def test_unknown_fields_are_reported(make_client: MakeClient) -> None:
    client = make_client(StubEngine(), WireFaults(edit_meta={"spec_verify_ct": 3}))
    assert (await client.generate(REQUEST)).unknown_fields == ("spec_verify_ct",)


async def test_passing_trouble_is_repeated(make_client: MakeClient) -> None:
    client = make_client(StubEngine(), WireFaults(statuses=(503, 429, 502, 504)))
    assert (await client.generate(REQUEST)).output_ids
    assert len(client.calls) == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [400, 404, 409, 500])
async def test_other_statuses_are_final(make_client: MakeClient, status: int) -> None:
    client = make_client(StubEngine(), WireFaults(statuses=(status,)))
    with pytest.raises(EngineStatusError, match="as asked") as caught:
        await client.generate(REQUEST)
    assert (caught.value.status, caught.value.code) == (status, "stub_fault")
    assert len(client.calls) == 1  # type: ignore[attr-defined]


async def test_repeating_ends(make_client: MakeClient) -> None:
    client = make_client(StubEngine(), WireFaults(statuses=(503,) * 9), max_retries=2)
    with pytest.raises(EngineStatusError) as caught:
        await client.generate(REQUEST)
    assert caught.value.status == 503
    assert len(client.calls) == 3  # type: ignore[attr-defined]


async def test_an_engine_that_is_not_there_is_named() -> None:
    client = SGLangEngine("http://127.0.0.1:9", max_retries=1, backoff_s=0.0)
    with pytest.raises(EngineUnreachableError, match=r"http://127.0.0.1:9/generate could not be reached in 2 attempts"):
        await client.generate(REQUEST)
    await client.abort("rid-1")
    await client.aclose()


async def test_abort_names_the_request(make_client: MakeClient) -> None:
    engine = StubEngine()
    await make_client(engine).abort("rid-1")
    assert engine.aborted == ["rid-1"]


async def test_hashed_replies_depend_on_input_and_seed_only() -> None:
    replies = [await StubEngine().generate(REQUEST) for _ in range(2)]
    assert replies[0].output_ids == replies[1].output_ids
    assert replies[0].logprobs.dtype == np.float32
