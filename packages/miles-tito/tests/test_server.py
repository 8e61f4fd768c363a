"""The session server over HTTP: what is honoured, what is refused, and that a refusal leaves no trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from miles_tito import (
    ExpertIdentityError,
    Family,
    MoeInfo,
    SessionServerClient,
    TokenIdentityError,
    VersionIdentityError,
    derive_seed,
    loads_batch,
)
from miles_tito.testing import StubEngine, StubReply, stub_routes

MakeServer = Callable[..., Any]
USER = {"role": "user", "content": "q"}
NEXT = {"role": "user", "content": "n"}


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["code"] == code, body
    assert body["status"] == status
    assert body["detail"]
    return body


async def test_a_turn_is_answered_in_openai_form(make_server: MakeServer) -> None:
    server = make_server()
    server.says("hello<|im_end|>")
    answer = await server.chat(await server.open(), [USER], model="m")
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert body["choices"][0]["finish_reason"] == "stop"
    prompt = len(server.engine.requests[0].input_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.headers["x-tito-node"] == "0"


async def test_sampling_is_the_requests_over_the_sessions_over_the_servers(make_server: MakeServer) -> None:
    server = make_server(default_max_new_tokens=77)
    first = await server.open(sampling={"temperature": 0.5, "top_k": 3, "max_new_tokens": 9, "stop": "###"}, seed=5)
    await server.chat(first, [USER], top_p=0.9)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_new_tokens) == (0.5, 3, 0.9, 9)
    assert sampling.stop == ("###",)
    assert sampling.stop_token_ids == server.family.stop_ids
    assert sampling.sampling_seed == derive_seed(5, 0)
    other = await server.open()
    body = {"max_completion_tokens": 4, "seed": 11, "stop": ["a", "b"], "stop_token_ids": [7], "min_tokens": 2}
    await server.chat(other, [USER], **body)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.max_new_tokens, sampling.sampling_seed, sampling.stop) == (4, 11, ("a", "b"))
    assert sampling.stop_token_ids == (7, *server.family.stop_ids)
    assert sampling.min_new_tokens == 2
    await server.chat(await server.open(), [USER])
    assert server.engine.requests[-1].sampling.max_new_tokens == 77
    assert server.engine.requests[-1].sampling.sampling_seed is None


async def test_each_turn_has_its_own_seed(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open(seed=5)
    messages: list[Any] = [USER]
    for _ in range(3):
        message = (await server.chat(session_id, messages)).json()["choices"][0]["message"]
        messages += [message, NEXT]
    seeds = [request.sampling.sampling_seed for request in server.engine.requests]
    assert seeds == [derive_seed(5, turn) for turn in range(3)]


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2},
        {"top_logprobs": 3},
        {"logit_bias": {"1": 5}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"reasoning_effort": "high"},
        {"input_ids": [1]},
        {"echo": True},
        {"best_of": 2},
        {"continue_final_message": True},
        {"logprob_start_len": 0},
        {"lora_path": "x"},
        {"skip_special_tokens": True},
        {"unheard_of": 1},
    ],
)
async def test_what_would_not_be_honoured_is_refused(make_server: MakeServer, field: dict[str, Any]) -> None:
    server = make_server()
    body = problem(await server.chat(await server.open(), [USER], **field), 400, "unsupported_field")
    assert body["field"] in field
    assert body["error"]["message"] == body["detail"]
    assert server.engine.requests == []


async def test_harmless_and_neutral_fields_are_taken(make_server: MakeServer) -> None:
    server = make_server()
    fields = {"model": "x", "user": "u", "metadata": {"a": "b"}, "store": True, "n": 1, "logprobs": False, "tools": []}
    neutral = {"tool_choice": "auto", "response_format": {"type": "text"}, "top_logprobs": None, "logit_bias": {}}
    answer = await server.chat(await server.open(), [USER], **fields, **neutral)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"stop": [""]},
        {"stop": 3},
        {"seed": "x"},
        {"tools": {"a": 1}},
        {"chat_template_kwargs": "x"},
        {"stream": "yes"},
        {"stream_options": 1},
    ],
)
async def test_impossible_values_are_refused(make_server: MakeServer, field: dict[str, Any]) -> None:
    server = make_server()
    problem(await server.chat(await server.open(), [USER], **field), 400, "invalid_value")


@pytest.mark.parametrize(
    "messages",
    [[], "x", None, {}, [1], [{"content": "x"}], [{"role": "wizard", "content": "x"}], [{"role": "user"}]]
    + [[{"role": role, "content": "x"}] for role in ([], {}, [None], 1, True)],
)
async def test_malformed_messages_are_400(make_server: MakeServer, messages: Any) -> None:
    server = make_server()
    problem(await server.chat(await server.open(), messages), 400, "invalid_messages")


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"not json", 400, "invalid_json"),
        (b"[1]", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"messages": NaN}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "invalid_unicode"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', 400, "invalid_json"),
    ],
)
async def test_bodies_that_are_no_text_are_400(make_server: MakeServer, data: bytes, status: int, code: str) -> None:
    server = make_server()
    session_id = await server.open()
    problem(await server.http.post(f"/sessions/{session_id}/v1/chat/completions", content=data), status, code)


@pytest.mark.parametrize("content", ["nul \0 byte", "\ufeffbom", "\\ud83d\\ude00 \U0001f600", "x" * 1_000_000])
async def test_any_real_text_is_served(make_server: MakeServer, content: str) -> None:
    server = make_server()
    assert (await server.chat(await server.open(), [{"role": "user", "content": content}])).status_code == 200
    assert content in server.prompt()


async def test_content_parts_are_joined_and_images_refused(make_server: MakeServer, qwen3: Family) -> None:
    server = make_server(qwen3)
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo", "cache_control": {}}]
    session_id = await server.open()
    server.says("<think>\n\n</think>\n\nx<|im_end|>", "<think>\n\n</think>\n\ny<|im_end|>")
    first = await server.chat(session_id, [{"role": "user", "content": parts}])
    assert "<|im_start|>user\nhello<|im_end|>" in server.prompt()
    message = first.json()["choices"][0]["message"]
    answer = await server.chat(session_id, [{"role": "user", "content": "hello"}, message, NEXT])
    assert answer.status_code == 200
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    problem(await server.chat(session_id, image), 400, "unsupported_content")


async def test_bad_tool_arguments_name_the_message(make_server: MakeServer, qwen3: Family) -> None:
    server = make_server(qwen3)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    body = problem(await server.chat(await server.open(), messages), 400, "invalid_tool_arguments")
    assert body["message_index"] == 1


async def test_null_content_and_empty_calls_are_taken(make_server: MakeServer, qwen3: Family) -> None:
    server = make_server(qwen3)
    server.says("<think>\n\n</think>\n\n<|im_end|>", "<think>\n\n</think>\n\ny<|im_end|>")
    session_id = await server.open()
    await server.chat(session_id, [USER])
    replay = {"role": "assistant", "content": None, "tool_calls": [], "reasoning": ""}
    assert (await server.chat(session_id, [USER, replay, NEXT])).status_code == 200


async def test_an_unknown_session_is_404_everywhere(make_server: MakeServer) -> None:
    server = make_server()
    problem(await server.chat("nope", [USER]), 404, "session_not_found")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/samples"), ("GET", "/v1/models")):
        problem(await server.http.request(method, f"/sessions/nope{path}"), 404, "session_not_found")


async def test_no_engine_route_is_reachable_through_a_session(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open()
    for path in ("update_weights_from_disk", "abort_request", "generate", "v1/completions"):
        problem(await server.http.post(f"/sessions/{session_id}/{path}", json={}), 404, "not_found")
        problem(await server.http.post(f"/sessions/unknown/{path}", json={}), 404, "not_found")
    models = await server.http.get(f"/sessions/{session_id}/v1/models")
    assert models.json()["data"][0]["id"] == "stub"
    problem(await server.http.put(f"/sessions/{session_id}"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "fault", [{"status": 400}, {"status": 500}, {"fault": "malformed"}, {"fault": "prompt_length"}]
)
async def test_a_failed_turn_leaves_no_trace(make_server: MakeServer, fault: dict[str, Any]) -> None:
    server = make_server()
    session_id = await server.open()
    server.says("x<|im_end|>", "y<|im_end|>")
    first = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    second = (await server.chat(session_id, [USER, first, NEXT])).json()["choices"][0]["message"]
    before = await server.view(session_id)
    # A divergent retry of the last turn that the engine fails.
    server.engine.script.append(StubReply(server.family.stop_ids, **fault))
    answer = await server.chat(session_id, [USER, first, {"role": "user", "content": "other"}])
    assert answer.status_code == fault.get("status", 502)
    assert await server.view(session_id) == before
    assert (await server.chat(session_id, [USER, first, NEXT, second, NEXT])).status_code == 200


async def test_a_failed_first_turn_leaves_the_session_open(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open()
    server.engine.script.append(StubReply(status=400))
    assert (await server.chat(session_id, [USER])).status_code == 400
    assert (await server.chat(session_id, [{"role": "user", "content": "something else"}])).status_code == 200


async def test_a_second_request_meanwhile_is_409_and_every_200_is_recorded(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open()
    server.says("x<|im_end|>", fault="slow")
    first = asyncio.create_task(server.chat(session_id, [USER]))
    await server.engine.entered.wait()
    problem(await server.chat(session_id, [USER]), 409, "session_busy")
    assert (await server.http.get("/sessions")).json()["sessions"][0]["busy"] is True
    server.engine.gate.set()
    assert (await first).status_code == 200
    assert len((await server.view(session_id))["turns"]) == 1
    assert (await server.chat(session_id, [USER])).status_code == 200


async def test_a_session_deleted_while_generating_answers_and_stores_nothing(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open()
    server.says("x<|im_end|>", fault="slow")
    chat = asyncio.create_task(server.chat(session_id, [USER]))
    await server.engine.entered.wait()
    assert (await server.http.delete(f"/sessions/{session_id}")).status_code == 204
    server.engine.gate.set()
    answer = await chat
    assert answer.status_code == 200
    assert "x-tito-node" not in answer.headers
    assert len(server.app.state.tito.store) == 0
    problem(await server.http.delete(f"/sessions/{session_id}"), 404, "session_not_found")


async def test_streaming_is_one_chunk_and_done(make_server: MakeServer, qwen3: Family) -> None:
    server = make_server(qwen3)
    server.says('<think>\nt\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>')
    answer = await server.chat(await server.open(), [USER], stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunk, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    body = json.loads(chunk.removeprefix("data: "))
    assert body["object"] == "chat.completion.chunk"
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["reasoning_content"] == "t"
    assert choice["delta"]["tool_calls"][0]["index"] == 0
    assert body["usage"]["completion_tokens"] > 0
    server.engine.script.append(StubReply(status=500))
    problem(await server.chat(await server.open(), [USER], stream=True), 500, "engine_status")


async def test_logprobs_are_those_of_the_sampled_ids(make_server: MakeServer) -> None:
    server = make_server()
    server.says("ab<|im_end|>")
    answer = await server.chat(await server.open(), [USER], logprobs=True)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "<|im_end|>"]
    assert [entry["logprob"] for entry in content] == [-0.5, -0.75, -1.0]


async def test_finish_reasons(make_server: MakeServer) -> None:
    server = make_server()
    for script, reason in (
        (StubReply(server.family.tokenizer.encode("ab"), "length"), "length"),
        (StubReply(server.family.tokenizer.encode("ab"), "abort"), "abort"),
        (StubReply(server.family.tokenizer.encode("ab"), "stop", matched="b"), "stop"),
        (StubReply(server.family.tokenizer.encode("ab"), "stop"), "length"),
    ):
        server.engine.script = [script]
        session_id = await server.open()
        answer = await server.chat(session_id, [USER])
        assert answer.json()["choices"][0]["finish_reason"] == reason
        message = answer.json()["choices"][0]["message"]
        problem(await server.chat(session_id, [USER, message, NEXT]), 409, "turn_truncated")


async def test_the_context_limit_is_known_before_the_engine_is_asked(make_server: MakeServer) -> None:
    server = make_server(max_context_tokens=40)
    session_id = await server.open()
    body = problem(
        await server.chat(session_id, [{"role": "user", "content": "x" * 40}]), 400, "context_length_exceeded"
    )
    assert body["field"] == "messages"
    assert server.engine.requests == []
    await server.chat(session_id, [USER], max_tokens=1000)
    request = server.engine.requests[0]
    assert request.sampling.max_new_tokens == 40 - len(request.input_ids)


async def test_the_engines_own_context_limits_the_answer(make_server: MakeServer, smollm2: Family) -> None:
    server = make_server(engine=StubEngine(stop_id=smollm2.stop_ids[0], max_context=30), max_context_tokens=50)
    await server.chat(await server.open(), [USER])
    request = server.engine.requests[0]
    assert request.sampling.max_new_tokens == 30 - len(request.input_ids)


async def test_sessions_are_capped_and_idle_ones_dropped(make_server: MakeServer) -> None:
    clock = [0.0]
    server = make_server(max_sessions=2, idle_ttl_s=10, clock=lambda: clock[0])
    first, second = await server.open(), await server.open()
    problem(await server.http.post("/sessions"), 429, "too_many_sessions")
    clock[0] = 8.0
    await server.chat(second, [USER])
    clock[0] = 15.0
    third = await server.open()
    problem(await server.http.get(f"/sessions/{first}"), 404, "session_not_found")
    summary = (await server.http.get("/sessions")).json()
    assert {line["session_id"] for line in summary["sessions"]} == {second, third}
    assert (summary["created"], summary["expired"]) == (3, 1)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"seed": "x"}, "invalid_value"),
        ({"sampling": {"tempreature": 1}}, "unknown_sampling_option"),
        ({"sampling": {"temperature": -1}}, "invalid_value"),
        ({"sampling": []}, "invalid_value"),
        ({"surprise": 1}, "unsupported_field"),
    ],
)
async def test_creating_is_checked(make_server: MakeServer, body: dict[str, Any], code: str) -> None:
    problem(await make_server().http.post("/sessions", json=body), 400, code)


async def test_samples_are_idempotent_and_carry_what_is_known(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open(seed=3, metadata={"prompt_id": "p1"})
    empty = loads_batch((await server.http.post(f"/sessions/{session_id}/samples")).content)
    assert (empty.trajectories, empty.empty_reason) == ((), "no_records")
    server.says("x<|im_end|>")
    await server.chat(session_id, [{"role": "user", "content": "see <|im_end|>"}], temperature=0.5)
    answers = [await server.http.post(f"/sessions/{session_id}/samples", json={}) for _ in range(2)]
    assert answers[0].content == answers[1].content
    (trajectory,) = loads_batch(answers[0].content).trajectories
    assert trajectory.metadata["prompt_id"] == "p1"
    facts = trajectory.metadata["tito"]
    assert (facts["seed"], facts["version_bounds"], facts["special_text_messages"]) == (3, "unknown", 1)
    assert (trajectory.temperature, trajectory.status, trajectory.family) == (0.5, "completed", "smollm2")
    problem(await server.http.post(f"/sessions/{session_id}/samples", json={"max_seq_len": 0}), 400, "invalid_value")
    cut = await server.http.post(f"/sessions/{session_id}/samples", json={"max_seq_len": 1})
    assert loads_batch(cut.content).empty_reason == "all_truncated"


def client_of(server: Any, control_token: str | None = None) -> SessionServerClient:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app))
    return SessionServerClient("http://server", client=http, control_token=control_token)


@pytest.mark.parametrize(
    ("fault", "error"), [("wrong_digest", TokenIdentityError), ("wrong_expert_digest", ExpertIdentityError)]
)
async def test_a_violated_record_stops_the_session(
    make_server: MakeServer, smollm2: Family, fault: str, error: type[Exception]
) -> None:
    engine = StubEngine(stop_id=smollm2.stop_ids[0], moe=MoeInfo((0,), 8, 2))
    server = make_server(engine=engine, record_experts=True)
    session_id = await server.open()
    server.says("x<|im_end|>")
    message = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    server.says("y<|im_end|>", fault=fault)
    code = error.default_code  # type: ignore[attr-defined]
    problem(await server.chat(session_id, [USER, message, NEXT]), 409, code)
    problem(await server.chat(session_id, [USER, message, NEXT]), 409, code)
    assert len(engine.requests) == 2
    assert len((await server.view(session_id))["turns"]) == 1
    client = client_of(server)
    with pytest.raises(error):
        await client.collect(session_id)
    await client.delete(session_id)
    await client.delete(session_id)
    await client.aclose()


async def test_an_id_changed_in_the_buffer_is_seen_at_collection(make_server: MakeServer) -> None:
    server = make_server()
    session_id = await server.open()
    await server.chat(session_id, [USER])
    server.app.state.tito.store.get(session_id).ids.view()[3] += 1
    client = client_of(server)
    with pytest.raises(TokenIdentityError, match=session_id):
        await client.collect(session_id)
    await client.aclose()


async def test_labels_outside_the_drivers_bounds_stop_the_session(make_server: MakeServer) -> None:
    server = make_server(control_token="secret")
    client = client_of(server, "secret")
    await client.set_versions(2, {"stub:0": 2})
    server.engine.version = 2
    good = await client.create(seed=1)
    assert (await server.chat(good.session_id, [USER])).status_code == 200
    assert (await client.collect(good.session_id))[0].metadata["tito"]["version_bounds"] == "checked"
    for label in (1, 3):
        bad = await client.create(seed=1)
        server.engine.version = label
        problem(await server.chat(bad.session_id, [USER]), 409, "version_identity")
        with pytest.raises(VersionIdentityError, match=f"version \\[{label}\\]"):
            await client.collect(bad.session_id)
    await client.aclose()


async def test_an_update_during_a_generation_widens_the_bounds(make_server: MakeServer) -> None:
    server = make_server()
    client = client_of(server)
    await client.set_versions(0, {"stub:0": 0})
    handle = await client.create(seed=1)
    server.says("ab<|im_end|>", fault="slow", versions=[0, 1, 1])
    chat = asyncio.create_task(server.chat(handle.session_id, [USER]))
    await server.engine.entered.wait()
    await client.set_versions(1, {"stub:0": 0})
    await client.set_versions(1, {"stub:0": 1})
    server.engine.gate.set()
    assert (await chat).status_code == 200
    (trajectory,) = await client.collect(handle.session_id)
    assert (trajectory.oldest_version, trajectory.turns[0].version_spans) == (0, ((0, 0), (1, 1)))
    await client.aclose()


async def test_the_control_route_wants_its_token(make_server: MakeServer) -> None:
    server = make_server(control_token="secret")
    body = {"begun": 1, "acknowledged": {}}
    problem(await server.http.post("/control/versions", json=body), 401, "unauthorised")
    wrong = {"authorization": "Bearer other"}
    problem(await server.http.post("/control/versions", json=body, headers=wrong), 401, "unauthorised")
    right = {"authorization": "Bearer secret"}
    assert (await server.http.post("/control/versions", json=body, headers=right)).status_code == 200
    for bad in ({"begun": -1}, {"acknowledged": {}}, {"begun": 1, "acknowledged": {"e": "1"}}, {"begun": 1, "x": 2}):
        problem(await server.http.post("/control/versions", json=bad, headers=right), 400, "invalid_versions")


async def test_experts_are_asked_for_incrementally_and_only_of_moe_models(
    make_server: MakeServer, smollm2: Family
) -> None:
    engine = StubEngine(stop_id=smollm2.stop_ids[0], moe=MoeInfo((0, 2), 8, 2))
    server = make_server(engine=engine, record_experts=True)
    session_id = await server.open()
    message = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    await server.chat(session_id, [USER, message, NEXT])
    first, second = engine.requests
    assert (first.want_experts, first.expert_row_start) == (True, 0)
    stored = (await server.view(session_id))["turns"][0]
    assert second.expert_row_start == stored["prompt_length"] + stored["completion_length"] - 1
    dense = make_server(record_experts=True)
    problem(await dense.chat(await dense.open(), [USER]), 502, "engine_not_moe")


@pytest.mark.parametrize("replays", [True, False])
async def test_held_routes_are_carried_only_to_an_engine_that_replays_them(
    make_server: MakeServer, smollm2: Family, replays: bool
) -> None:
    engine = StubEngine(stop_id=smollm2.stop_ids[0], moe=MoeInfo((0, 2), 8, 2, replays_routes=replays))
    server = make_server(engine=engine, record_experts=True)
    session_id = await server.open()
    message = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    for _ in range(2):  # the second time as a retry of the same turn
        await server.chat(session_id, [USER, message, NEXT])
    first, second, retried = engine.requests
    assert first.expert_prefix is None
    if not replays:
        assert (second.expert_prefix, retried.expert_prefix) == (None, None)
        return
    assert second.expert_prefix is not None
    assert second.expert_prefix.dtype == np.int32
    assert engine.moe is not None
    held = stub_routes(np.asarray(second.input_ids, np.int64), engine.moe)[: second.expert_row_start]
    np.testing.assert_array_equal(second.expert_prefix, held)
    np.testing.assert_array_equal(retried.expert_prefix, held)


async def test_no_routes_are_carried_when_none_are_recorded(make_server: MakeServer, smollm2: Family) -> None:
    engine = StubEngine(stop_id=smollm2.stop_ids[0], moe=MoeInfo((0, 2), 8, 2, replays_routes=True))
    server = make_server(engine=engine)
    session_id = await server.open()
    message = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    await server.chat(session_id, [USER, message, NEXT])
    assert [request.expert_prefix for request in engine.requests] == [None, None]


async def test_thinking_can_be_switched_in_mid_session(make_server: MakeServer, qwen3: Family) -> None:
    server = make_server(qwen3)
    server.says("<think>\nr\n</think>\n\nx<|im_end|>", "y<|im_end|>")
    session_id = await server.open()
    message = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    off = {"enable_thinking": False}
    answer = await server.chat(session_id, [USER, message, NEXT], chat_template_kwargs=off)
    assert answer.status_code == 200
    assert server.prompt().endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    view = await server.view(session_id)
    assert view["metadata"]["tito_session_mismatch"] == []
    conflict = {"clear_thinking": True}
    code = "conflicting_template_kwarg"
    problem(await server.chat(await server.open(), [USER], chat_template_kwargs=conflict), 400, code)


async def test_tools_changed_in_mid_session_are_refused_without_false_alarm(
    make_server: MakeServer, qwen3: Family
) -> None:
    server = make_server(qwen3)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    server.says("<think>\n\n</think>\n\nx<|im_end|>")
    session_id = await server.open()
    message = (await server.chat(session_id, [USER])).json()["choices"][0]["message"]
    problem(await server.chat(session_id, [USER, message, NEXT], tools=tools), 400, "tools_changed")
    assert (await server.view(session_id))["metadata"]["tito_session_mismatch"] == []


async def test_large_bodies_are_413(smollm2: Family) -> None:
    from miles_tito import ServerConfig, TitoConfig
    from miles_tito.server import create_app

    config = TitoConfig(server=ServerConfig(max_body_bytes=2048))
    app = create_app(config, engine=StubEngine(), tokenizer=smollm2.tokenizer, family=smollm2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        problem(await http.post("/sessions", content=b"x" * 4096), 413, "body_too_large")


@pytest.mark.verifies("openai", "its client talks to the session server unchanged")
async def test_an_openai_client_works_unchanged(make_server: MakeServer, qwen3: Family) -> None:
    server = make_server(qwen3)
    server.says(
        '<think>\nt\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\ndone<|im_end|>",
        "<think>\n\n</think>\n\nstreamed<|im_end|>",
    )
    session_id = await server.open()
    agent = openai.AsyncOpenAI(
        base_url=f"http://server/sessions/{session_id}/v1", api_key="x", http_client=server.http, max_retries=0
    )
    messages: list[Any] = [USER]
    first = await agent.chat.completions.create(model="m", messages=messages)
    message = first.choices[0].message
    assert message.tool_calls[0].function.arguments == '{"a": 1}'
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
    second = await agent.chat.completions.create(model="m", messages=messages)
    assert second.choices[0].message.content == "done"
    messages += [second.choices[0].message.model_dump(exclude_none=True), NEXT]
    stream = await agent.chat.completions.create(model="m", messages=messages, stream=True)
    texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert texts == ["streamed"]
    with pytest.raises(openai.BadRequestError, match="not supported"):
        await agent.chat.completions.create(model="m", messages=messages, n=3)
