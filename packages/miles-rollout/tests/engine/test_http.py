"""The engine's HTTP routes: SGLang's fields, errors with codes, auth."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from miles_rollout.local import EngineConfig
from miles_rollout.local.engine import LocalEngine
from miles_rollout.records import Record, expert_digest, record_digest
from miles_rollout.server.app import create_engine_app
from miles_rollout.server.bodies import MAX_BODY_BYTES

TOKEN = "control"
AUTH = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def engine(moe_folder: Path) -> AsyncIterator[LocalEngine]:
    with LocalEngine(moe_folder, EngineConfig(), name="e", epoch=2) as started:
        yield started


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_engine_app(engine, control_token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def body(new: int = 6, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "temperature": 0.8, "sampling_seed": 11, "ignore_eos": True}
    return {"input_ids": [1, 2, 3, 4], "sampling_params": sampling, "return_logprob": True, **fields}


async def test_a_reply_carries_the_fields_and_digests_of_the_contract(http: httpx.AsyncClient) -> None:
    response = await http.post("/generate", json=body(rid="r1", return_routed_experts=True, routed_experts_start_len=1))
    assert response.status_code == 200
    reply = response.json()
    meta = reply["meta_info"]
    info = (await http.get("/model_info")).json()
    shape = (4 + 6 - 1 - 1, len(info["moe"]["layers"]), info["moe"]["top_k"])
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(shape)
    record = Record(
        input_ids=[1, 2, 3, 4],
        output_ids=reply["output_ids"],
        logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32),
        version_spans=[tuple(span) for span in meta["weight_version_spans"]],
        experts=experts,
        expert_row_start=1,
        expert_version_spans=[tuple(span) for span in meta["routed_experts_version_spans"]],
    )
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["record_digest"] == record_digest(record)
    assert meta["expert_digest"] == expert_digest(record)
    assert (meta["id"], meta["engine_id"], meta["weight_version"]) == ("r1", "e:2", "0")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 6, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["weight_version_spans"], meta["routed_experts_version_spans"]) == ([[0, 0]], [[0, 0]])
    assert meta["e2e_latency"] > 0


async def test_scoring_gives_input_logprobs_with_an_empty_first_entry(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 0, "temperature": 0}
    wanted = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 1}
    reply = (await http.post("/generate", json=wanted)).json()
    entries = reply["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == [6, 7, 8]
    assert entries[0][0] is None
    assert all(entry[0] < 0 for entry in entries[1:])
    assert reply["output_ids"] == []


async def test_without_return_logprob_there_is_neither_logprob_nor_digest(http: httpx.AsyncClient) -> None:
    meta = (await http.post("/generate", json=body(return_logprob=False))).json()["meta_info"]
    assert not {"output_token_logprobs", "record_digest"} & set(meta)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"input_ids": None, "text": "hello"}, "invalid_field"),
        ({"text": "hello"}, "unsupported_field"),
        ({"stream": True}, "unsupported_field"),
        ({"lora_path": "adapter"}, "unsupported_field"),
        ({"top_logprobs_num": 3}, "unsupported_field"),
        ({"max_tokens": 4}, "unknown_field"),
        ({"input_ids": []}, "empty_input"),
        ({"input_ids": [[1, 2]]}, "invalid_field"),
        ({"input_ids": [1, "2"]}, "invalid_field"),
        ({"input_ids": [259]}, "token_out_of_range"),
        ({"sampling_params": {"max_new_tokens": 600}}, "context_too_long"),
        ({"sampling_params": {"temperature": -1}}, "invalid_sampling"),
        ({"sampling_params": {"frequency_penalty": 0.5}}, "unsupported_field"),
        ({"sampling_params": {"n": 2}}, "unsupported_field"),
        ({"sampling_params": {"temprature": 1}}, "unknown_field"),
        ({"logprob_start_len": 4}, "invalid_logprob_start"),
        ({"return_routed_experts": True, "routed_experts_start_len": 4}, "invalid_experts_start"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_a_code(
    http: httpx.AsyncClient, fields: dict[str, Any], code: str
) -> None:
    response = await http.post("/generate", json=body() | fields)
    answer = response.json()
    assert (response.status_code, answer["code"], answer["status"]) == (400, code, 400)
    assert response.headers["content-type"] == "application/problem+json"
    assert answer["detail"]


async def test_neutral_values_of_unserved_fields_are_accepted(http: httpx.AsyncClient) -> None:
    neutral = body(stream=False, lora_path=None, top_logprobs_num=0, image_data=None)
    neutral["sampling_params"] |= {"min_p": 0.0, "repetition_penalty": 1.0, "n": 1, "json_schema": None, "stop": None}
    assert (await http.post("/generate", json=neutral)).status_code == 200


@pytest.mark.parametrize(
    ("content", "code"), [(b"{", "invalid_json"), (b"[]", "invalid_field"), (b"\xff", "invalid_json")]
)
async def test_a_body_that_is_no_object_is_refused(http: httpx.AsyncClient, content: bytes, code: str) -> None:
    response = await http.post("/generate", content=content)
    assert (response.status_code, response.json()["code"]) == (400, code)


async def test_text_alone_says_why_it_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/generate", json={"text": "hello"})
    assert (response.status_code, response.json()["code"]) == (400, "unsupported_field")
    assert "input_ids" in response.json()["detail"]


CONTROL = [
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weight_version"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/destroy_weights_update_group"),
    ("POST", "/update_weights_from_distributed"),
    ("GET", "/server_info"),
]


@pytest.mark.parametrize(("method", "path"), CONTROL)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}])
async def test_control_routes_need_the_token(
    http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]
) -> None:
    response = await http.request(method, path, headers=headers)
    assert (response.status_code, response.json()["code"]) == (401, "unauthorized")


async def test_pause_continue_and_versions(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    assert (await http.post("/pause_generation", json={"mode": "retract"}, headers=AUTH)).json()["success"] is True
    waiting = asyncio.create_task(http.post("/generate", json=body()))
    await until(lambda: engine.stats().waiting == 1)
    assert (await http.post("/update_weight_version", json={"new_version": "3"}, headers=AUTH)).status_code == 200
    assert (await http.post("/continue_generation", json={}, headers=AUTH)).status_code == 200
    assert (await waiting).json()["meta_info"]["weight_version_spans"] == [[0, 3]]
    back = await http.post("/update_weight_version", json={"new_version": "2"}, headers=AUTH)
    assert (back.status_code, back.json()["code"], back.json()["success"]) == (400, "version_not_rising", False)
    default = await http.post("/update_weight_version", json={"new_version": "default"}, headers=AUTH)
    assert default.json()["code"] == "invalid_version"


async def test_a_label_aborts_only_when_asked_to(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    task = asyncio.create_task(http.post("/generate", json=body(new=400)))
    await until(lambda: engine.stats().running == 1)
    await http.post("/update_weight_version", json={"new_version": "1"}, headers=AUTH)
    assert engine.stats().running == 1
    aborting = {"new_version": "2", "abort_all_requests": True}
    await http.post("/update_weight_version", json=aborting, headers=AUTH)
    assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_by_prefix_returns_what_there_is(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    task = asyncio.create_task(http.post("/generate", json=body(new=400, rid="session-7-turn-1")))
    await until(lambda: engine.stats().generated_tokens > 2)
    answer = await http.post("/abort_request", json={"rid": "session-7"}, headers=AUTH)
    assert answer.json()["num_aborted"] == 1
    reply = (await task).json()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) > 2
    nothing = await http.post("/abort_request", json={}, headers=AUTH)
    assert nothing.json()["code"] == "invalid_field"


async def test_flush_is_refused_while_busy(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    task = asyncio.create_task(http.post("/generate", json=body(new=400)))
    await until(lambda: engine.stats().running == 1)
    busy = await http.post("/flush_cache", headers=AUTH)
    assert (busy.status_code, busy.json()["code"]) == (400, "engine_busy")
    await http.post("/pause_generation", json={"mode": "abort"}, headers=AUTH)
    assert (await http.get("/flush_cache", headers=AUTH)).status_code == 200
    assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_poisoned_engine_says_so(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    await asyncio.to_thread(engine.port.poison, "a digest differed")
    for method, path in (("POST", "/generate"), ("GET", "/health"), ("GET", "/health_generate")):
        response = await http.request(method, path, json=body())
        assert (response.status_code, response.json()["code"]) == (503, "engine_poisoned")
        assert response.headers["retry-after"] == "1"


async def test_health_and_information(http: httpx.AsyncClient, engine: LocalEngine, moe_folder: Path) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/health_generate")).status_code == 200
    assert engine.stats().generated_tokens == 1
    await http.post("/pause_generation", json={"mode": "in_place"}, headers=AUTH)
    assert (await http.get("/health_generate")).status_code == 200
    info = (await http.get("/model_info")).json()
    assert (info["model_path"], info["weight_version"], info["engine_id"]) == (str(moe_folder), "0", "e:2")
    assert info["moe"] == {"layers": [0, 2], "num_experts": 8, "top_k": 2, "replays_routes": True}
    assert (await http.get("/get_model_info")).json() == info
    server = (await http.get("/server_info", headers=AUTH)).json()
    assert (server["engine"]["dtype"], server["paused"]) == ("fp32", True)


async def test_metrics_are_prometheus_text(http: httpx.AsyncClient) -> None:
    await http.post("/generate", json=body())
    response = await http.get("/metrics")
    lines = response.text.splitlines()
    values = dict(line.split() for line in lines if not line.startswith("#"))
    assert response.headers["content-type"].startswith("text/plain")
    assert (values["sglang:num_running_reqs"], values["sglang:generation_tokens_total"]) == ("0", "6")
    assert "# TYPE sglang:gen_throughput gauge" in lines


async def test_pickle_is_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    response = await http.post("/update_weights_from_tensor", json={"serialized_named_tensors": ["x"]}, headers=AUTH)
    assert (response.status_code, response.json()["code"]) == (400, "pickle_refused")
    assert "pickled" in response.json()["detail"]


async def test_unknown_routes_and_methods_are_problems(http: httpx.AsyncClient) -> None:
    assert (await http.get("/nowhere")).json()["code"] == "no_such_route"
    assert (await http.get("/generate")).json()["code"] == "method_not_allowed"


HOSTILE = {
    "deep list": (b"[" * 200_000, "invalid_json"),
    "deep object": (b'{"a":' * 100_000, "invalid_json"),
    "no text": (b"\xff\xfe", "invalid_json"),
    "lone surrogate": (b'{"input_ids": [1], "rid": "\\ud800"}', "invalid_unicode"),
    "lone surrogate as key": (b'{"\\udfff": 1}', "invalid_unicode"),
}


@pytest.mark.parametrize(("data", "code"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("path", ["/generate", "/pause_generation", "/update_weights_from_disk"])
async def test_a_body_that_is_no_text_is_400(http: httpx.AsyncClient, path: str, data: bytes, code: str) -> None:
    answer = await http.post(path, content=data, headers=AUTH)
    assert (answer.status_code, answer.json()["code"]) == (400, code)


async def test_labels_and_folders_of_absurd_length_are_400(http: httpx.AsyncClient) -> None:
    nines = "9" * 5000
    for path, fields, code in (
        ("/update_weight_version", {"new_version": nines}, "invalid_version"),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": nines}, "invalid_version"),
        ("/update_weights_from_disk", {"model_path": nines}, "checkpoint_unreadable"),
    ):
        answer = await http.post(path, json=fields, headers=AUTH)
        assert (answer.status_code, answer.json()["code"]) == (400, code)
        assert len(answer.json()["detail"]) < 1000


async def test_a_folder_with_a_broken_index_is_400(http: httpx.AsyncClient, tmp_path: Path) -> None:
    for index in ("{", "[]", "{}", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        answer = await http.post("/update_weights_from_disk", json={"model_path": str(tmp_path)}, headers=AUTH)
        assert (answer.status_code, answer.json()["code"]) == (400, "checkpoint_unreadable")


async def test_a_body_over_the_limit_is_413(http: httpx.AsyncClient) -> None:
    answer = await http.post("/generate", content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
