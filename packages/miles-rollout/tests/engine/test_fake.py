"""The fake engine speaks the engine API, and its faults are what they say. The control client checks what it gets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from miles_rollout.engines import EngineControl, EngineControlError, FakeEngine
from miles_rollout.records import Record, record_digest


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def http(fake: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(fake.app), base_url="http://fake") as client:
        yield client


@pytest.fixture
def control(http: httpx.AsyncClient) -> EngineControl:
    return EngineControl("http://fake", client=http)


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "return_logprob": True, **fields}


def digest(reply: dict[str, Any]) -> str:
    meta = reply["meta_info"]
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32)
    return record_digest(Record([1, 2, 3], reply["output_ids"], logprobs, meta["weight_version_spans"]))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def test_equal_requests_get_equal_tokens_and_sound_digests(http: httpx.AsyncClient) -> None:
    first, second = [(await http.post("/generate", json=body())).json() for _ in range(2)]
    assert first["output_ids"] == second["output_ids"]
    assert first["meta_info"]["record_digest"] == digest(first)


async def test_another_seed_gives_other_tokens(http: httpx.AsyncClient) -> None:
    seeded = [body(sampling_params={"max_new_tokens": 5, "sampling_seed": seed}) for seed in (1, 2)]
    replies = [(await http.post("/generate", json=b)).json()["output_ids"] for b in seeded]
    assert replies[0] != replies[1]


@pytest.mark.parametrize("status", [500, 503])
async def test_errors_are_injected_once(http: httpx.AsyncClient, fake: FakeEngine, status: int) -> None:
    fake.inject("error_500" if status == 500 else "error_503")
    assert (await http.post("/generate", json=body())).status_code == status
    assert (await http.post("/generate", json=body())).status_code == 200


async def test_identities_are_violated_on_demand(http: httpx.AsyncClient, fake: FakeEngine) -> None:
    for fault in ("wrong_digest", "wrong_ids", "wrong_version"):
        fake.inject(fault)  # type: ignore[arg-type]
        reply = (await http.post("/generate", json=body())).json()
        assert reply["meta_info"]["record_digest"] != digest(reply), fault


async def test_a_reply_can_be_malformed_dropped_or_late(http: httpx.AsyncClient, fake: FakeEngine) -> None:
    fake.inject("malformed")
    with pytest.raises(ValueError):
        (await http.post("/generate", json=body())).json()
    fake.inject("drop")
    with pytest.raises(ConnectionResetError):
        await http.post("/generate", json=body())
    fake.inject("hang")
    task = asyncio.create_task(http.post("/generate", json=body()))
    await until(lambda: len(fake.received) == 3)
    assert not task.done()
    await fake.release()
    assert (await task).status_code == 200


async def test_control_reaches_pause_versions_and_abort(
    http: httpx.AsyncClient, fake: FakeEngine, control: EngineControl
) -> None:
    await control.pause("retract")
    tasks = [asyncio.create_task(http.post("/generate", json=body(rid=rid))) for rid in ("a", "b")]
    await until(lambda: fake.running == 2)
    await control.abort("a")
    assert (await tasks[0]).json()["meta_info"]["finish_reason"]["type"] == "abort"
    await control.flush()
    await control.set_version(4)
    await control.resume()
    assert (await tasks[1]).json()["meta_info"]["weight_version_spans"] == [[0, 4]]
    assert fake.calls == ["pause:retract", "generate", "generate", "abort", "flush", "version:4", "continue"]
    info = await control.model_info()
    assert (info.weight_version, info.engine_id) == (4, "fake:1")


async def test_poison_and_health(http: httpx.AsyncClient, fake: FakeEngine, control: EngineControl) -> None:
    assert await control.healthy()
    fake.poisoned = True
    assert not await control.healthy()
    assert (await http.post("/generate", json=body())).json()["code"] == "engine_poisoned"
    await control.update_weights_from_disk("somewhere", 1)
    assert (await http.post("/generate", json=body())).status_code == 200


async def test_a_flush_that_stays_refused_reports_the_last_answer(
    http: httpx.AsyncClient, fake: FakeEngine, control: EngineControl
) -> None:
    fake.inject("hang")
    await control.pause("in_place")
    fake.paused = None
    fake.delay_s = 30
    task = asyncio.create_task(http.post("/generate", json=body()))
    await fake.release()
    await until(lambda: fake.running == 1)
    with pytest.raises(EngineControlError, match="1 requests are running"):
        await control.flush(timeout_s=0.05)
    task.cancel()


async def test_success_false_under_status_200_is_a_failure() -> None:
    async def refuse(_request: object) -> JSONResponse:
        return JSONResponse({"success": False, "message": "partially updated"})

    app = Starlette(routes=[Route("/continue_generation", refuse, methods=["POST"])])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        with pytest.raises(EngineControlError, match="partially updated"):
            await EngineControl("http://old", client=client).resume()


async def test_the_older_model_route_and_the_default_label_are_understood() -> None:
    async def info(_request: object) -> JSONResponse:
        return JSONResponse({"model_path": "m", "weight_version": "default"})

    app = Starlette(routes=[Route("/get_model_info", info)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        found = await EngineControl("http://old", client=client).model_info()
    assert (found.model_path, found.weight_version, found.engine_id, found.moe) == ("m", 0, None, None)


async def test_an_engine_that_is_not_there_is_named() -> None:
    async with EngineControl("http://127.0.0.1:9", timeout_s=5) as control:
        assert not await control.healthy()
        with pytest.raises(EngineControlError, match=r"http://127\.0\.0\.1:9/continue_generation did not answer"):
            await control.resume()


def test_clients_and_fake_engine_need_no_torch() -> None:
    code = (
        "import sys, miles_rollout.engines, miles_rollout.records, miles_rollout.local, miles_rollout.server.bodies;"
        "raise SystemExit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
