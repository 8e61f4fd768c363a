"""Weights over HTTP: a folder, and a gloo broadcast from another process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from miles_rollout.engines import EngineControl, EngineControlError
from miles_rollout.local import EngineConfig, EngineRequest, SamplingParams
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.store import tensor_bytes
from miles_rollout.server.app import create_engine_app

REQUEST = EngineRequest(tuple(range(20)), SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True))

SENDER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper

port, folder, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=60))
group, _ = _new_process_group_helper(
    2, 0, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60)
)
tensors = load_file(folder + "/model.safetensors")
for line in sys.stdin:
    for tensor_name in line.split():
        group.broadcast(tensors[tensor_name], 0).wait()
    print("sent", flush=True)
"""


@pytest.fixture
async def engine(moe_folder: Path) -> AsyncIterator[LocalEngine]:
    with LocalEngine(moe_folder, EngineConfig()) as started:
        yield started


@pytest.fixture
async def control(engine: LocalEngine) -> AsyncIterator[EngineControl]:
    transport = httpx.ASGITransport(create_engine_app(engine, control_token="secret"))
    async with httpx.AsyncClient(transport=transport) as client:
        yield EngineControl("http://engine", token="secret", client=client)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def assert_serves(engine: LocalEngine, folder: Path, version: int) -> None:
    reply = await engine.generate(REQUEST)
    (expected,) = LocalEngine(folder, EngineConfig()).generate_sync([REQUEST])
    assert reply.output_ids == expected.output_ids
    assert reply.weight_version_spans == ((0, version),)


async def test_a_folder_is_installed_under_running_requests(
    control: EngineControl, engine: LocalEngine, moe_folder_next: Path
) -> None:
    long = EngineRequest(tuple(range(9)), SamplingParams(max_new_tokens=300, sampling_seed=1, ignore_eos=True))
    task = asyncio.create_task(engine.generate(long))
    await until(lambda: engine.stats().generated_tokens > 3)
    await control.update_weights_from_disk(str(moe_folder_next), 4)
    reply = await task
    assert [version for _, version in reply.weight_version_spans] == [0, 4]
    assert len(reply.output_ids) == 300
    await assert_serves(engine, moe_folder_next, 4)
    assert (await control.model_info()).weight_version == 4


async def test_a_paused_engine_stays_paused_after_a_disk_update(
    control: EngineControl, engine: LocalEngine, moe_folder_next: Path
) -> None:
    await control.pause("retract")
    await control.flush()
    await control.update_weights_from_disk(str(moe_folder_next), 1)
    assert engine.paused
    await control.resume()
    await assert_serves(engine, moe_folder_next, 1)


async def test_a_broken_folder_changes_nothing(
    control: EngineControl, engine: LocalEngine, moe_folder: Path, moe_folder_next: Path, tmp_path: Path
) -> None:
    tensors = load_file(moe_folder_next / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineControlError, match=r"missing model\.norm\.weight"):
        await control.update_weights_from_disk(str(tmp_path), 1)
    with pytest.raises(EngineControlError, match="checkpoint_missing"):
        await control.update_weights_from_disk(str(tmp_path / "nowhere"), 1)
    await assert_serves(engine, moe_folder, 0)


async def test_a_broadcast_from_another_process_is_installed(
    control: EngineControl, engine: LocalEngine, moe_folder_next: Path
) -> None:
    tensors = load_file(moe_folder_next / "model.safetensors")
    names = sorted(tensors)
    port, group = free_port(), "weights-0"
    command = [sys.executable, "-c", SENDER, str(port), str(moe_folder_next), group]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        await control.join_group("127.0.0.1", port, rank=1, world_size=2, name=group)
        await control.pause("retract")
        for bucket in (names[:30], names[30:]):
            assert sender.stdin is not None
            sender.stdin.write(" ".join(bucket) + "\n")
            sender.stdin.flush()
            shapes = [tuple(tensors[name].shape) for name in bucket]
            await control.receive_bucket(group, bucket, ["torch.float32"] * len(bucket), shapes)
        with pytest.raises(EngineControlError, match="weights_uncommitted"):
            await control.resume()
        await control.set_version(2)
        await control.resume()
        assert all(bytes(engine.port.read(name)) == bytes(tensor_bytes(tensors[name])) for name in names)
        await assert_serves(engine, moe_folder_next, 2)
        await control.leave_group(group)
    finally:
        sender.kill()
        sender.communicate(timeout=30)


async def test_a_broadcast_of_an_unknown_tensor_stores_nothing(
    control: EngineControl, engine: LocalEngine, moe_folder: Path, moe_folder_next: Path
) -> None:
    port, group = free_port(), "weights-1"
    command = [sys.executable, "-c", SENDER, str(port), str(moe_folder_next), group]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        await control.join_group("127.0.0.1", port, rank=1, world_size=2, name=group)
        await control.pause("retract")
        assert sender.stdin is not None
        sender.stdin.write("model.norm.weight\n")
        sender.stdin.flush()
        with pytest.raises(EngineControlError, match=r"no tensor 'model\.renamed\.weight'"):
            await control.receive_bucket(group, ["model.renamed.weight"], ["float32"], [(32,)])
        await control.resume()
        await assert_serves(engine, moe_folder, 0)
    finally:
        sender.kill()
        sender.communicate(timeout=30)


async def test_group_errors_are_told(control: EngineControl) -> None:
    with pytest.raises(EngineControlError, match="no_group"):
        await control.receive_bucket("absent", ["a"], ["float32"], [(1,)])
    with pytest.raises(EngineControlError, match="no_group"):
        await control.leave_group("absent")
    with pytest.raises(EngineControlError, match="use gloo"):
        await control.join_group("127.0.0.1", 1, rank=1, world_size=2, name="g", backend="nccl")
