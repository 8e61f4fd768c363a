"""The engine as a process: announcement, real HTTP, disconnects, SIGTERM, a port in use."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from miles_rollout.errors import PortInUseError
from miles_rollout.listening import bind

MAIN = """
import sys
from miles_rollout.local.config import EngineServerConfig
from miles_rollout.server.run import serve_engine

serve_engine(EngineServerConfig.model_validate_json(sys.argv[1]))
print("ended in order", flush=True)
"""


def start(config: dict[str, Any]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, json.dumps(config)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def served(dense_folder: Path) -> Iterator[dict[str, Any]]:
    process, ready = start({"model_dir": str(dense_folder), "name": "proc", "epoch": 3})
    try:
        yield ready
    finally:
        process.kill()
        process.communicate(timeout=30)


def body(new: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "sampling_seed": 1, "ignore_eos": True}
    return {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}


async def running(client: httpx.AsyncClient) -> int:
    return int((await client.get("/server_info")).json()["num_running_reqs"])


async def wait_for_running(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(30):
        while await running(client) != count:
            await asyncio.sleep(0.005)


async def test_the_announced_address_serves(served: dict[str, Any]) -> None:
    assert (served["event"], served["engine_id"], served["host"]) == ("ready", "proc:3", "127.0.0.1")
    async with httpx.AsyncClient(base_url=served["url"], timeout=30) as client:
        replies = await asyncio.gather(*(client.post("/generate", json=body(8)) for _ in range(6)))
    assert {tuple(reply.json()["output_ids"]) for reply in replies} == {tuple(replies[0].json()["output_ids"])}


async def test_a_client_that_goes_away_aborts_its_request(served: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=served["url"], timeout=30) as client:
        task = asyncio.create_task(client.post("/generate", json=body(508)))
        await wait_for_running(client, 1)
        task.cancel()
        await wait_for_running(client, 0)
        metrics = (await client.get("/metrics")).text
    generated = next(line for line in metrics.splitlines() if line.startswith("sglang:generation_tokens_total"))
    assert int(generated.split()[1]) < 508


async def test_sigterm_lets_running_requests_end(dense_folder: Path) -> None:
    process, ready = start({"model_dir": str(dense_folder), "drain_timeout_s": 30})
    try:
        async with httpx.AsyncClient(base_url=ready["url"], timeout=30) as client:
            task = asyncio.create_task(client.post("/generate", json=body(200)))
            await wait_for_running(client, 1)
            process.send_signal(signal.SIGTERM)
            assert len((await task).json()["output_ids"]) == 200
        out, _ = await asyncio.to_thread(process.communicate, timeout=30)
        assert out == "ended in order\n"
        assert process.returncode == 0
    finally:
        process.kill()


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
