"""The engine in its own thread: many callers, aborts, failures, updates under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_rollout.local import (
    EngineClosedError,
    EngineConfig,
    EnginePoisonedError,
    EngineReply,
    EngineRequest,
    RequestError,
    SamplingParams,
)
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.testing import RowByRowNumerics, checkpoint_tensors

DEADLINE_S = 30.0


def request(rid: str, *, seed: int = 1, length: int = 20, new: int = 10) -> EngineRequest:
    ids = tuple(int(x) for x in np.random.default_rng(seed).integers(0, 256, length))
    return EngineRequest(ids, SamplingParams(max_new_tokens=new, sampling_seed=seed, ignore_eos=True), rid=rid)


@pytest.fixture
async def engine(dense_folder: Path) -> AsyncIterator[LocalEngine]:
    with LocalEngine(dense_folder, EngineConfig(max_context=512)) as started:
        yield started


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_concurrent_requests_all_end(engine: LocalEngine) -> None:
    requests = [request(f"r{i}", seed=i, length=5 + i) for i in range(40)]
    replies = await asyncio.gather(*(engine.generate(r) for r in requests))
    assert [reply.rid for reply in replies] == [r.rid for r in requests]
    assert {len(reply.output_ids) for reply in replies} == {10}
    assert engine.stats().generated_tokens == 400


async def test_the_threaded_engine_equals_the_straight_line(dense_folder: Path, engine: LocalEngine) -> None:
    requests = [request(f"r{i}", seed=i, length=5 + i) for i in range(12)]
    threaded = await asyncio.gather(*(engine.generate(r) for r in requests))
    straight = LocalEngine(dense_folder, EngineConfig()).generate_sync(requests)
    assert [r.output_ids for r in threaded] == [r.output_ids for r in straight]


async def test_requests_wait_during_a_pause(engine: LocalEngine) -> None:
    await asyncio.to_thread(engine.port.pause, "retract")
    task = asyncio.create_task(engine.generate(request("r")))
    await until(lambda: engine.stats().waiting == 1)
    assert not task.done()
    await asyncio.to_thread(engine.port.resume)
    assert len((await task).output_ids) == 10


async def test_an_abort_keeps_the_tokens(engine: LocalEngine) -> None:
    task = asyncio.create_task(engine.generate(request("victim-1", new=400)))
    other = asyncio.create_task(engine.generate(request("other", new=20)))
    await until(lambda: engine.stats().generated_tokens > 10)
    assert await engine.abort("victim") == 1
    reply = await task
    assert (reply.finish.type, reply.finish.message) == ("abort", "aborted on request")
    assert 0 < len(reply.output_ids) == len(reply.output_logprobs) < 400
    assert len((await other).output_ids) == 20


async def test_cancelling_the_caller_aborts_the_request(engine: LocalEngine) -> None:
    task = asyncio.create_task(engine.generate(request("r", new=450)))
    await until(lambda: engine.stats().running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.stats().running == 0)
    assert engine.stats().generated_tokens < 450


class FailingNumerics(RowByRowNumerics):
    """Fails the forward that sees a sequence of exactly `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(
        self, query_QHD: torch.Tensor, key_SGD: torch.Tensor, value_SGD: torch.Tensor, first_position: int, scale: float
    ) -> torch.Tensor:
        if len(key_SGD) == self.length:
            raise RuntimeError("a kernel broke")
        return super().attend(query_QHD, key_SGD, value_SGD, first_position, scale)


async def test_a_failing_batch_ends_with_what_it_has_and_the_loop_lives_on(dense_folder: Path) -> None:
    with LocalEngine(dense_folder, EngineConfig(), numerics=FailingNumerics(25)) as engine:
        failed = await engine.generate(request("r", length=20))
        assert failed.finish.type == "abort"
        assert "RuntimeError: a kernel broke" in failed.finish.message
        # The pass over token 25 failed: tokens 21 to 25 had been drawn.
        assert len(failed.output_ids) == 5
        after = await engine.generate(request("next", seed=2, length=30))
        assert len(after.output_ids) == 10
        assert engine.stats().failed_steps == 1


async def test_weights_that_give_no_numbers_end_requests(dense_folder: Path) -> None:
    with LocalEngine(dense_folder, EngineConfig()) as engine:
        tensors: dict[str, Any] = checkpoint_tensors(dense_folder)
        tensors["model.norm.weight"].data[:] = np.full(32, np.nan, np.float32).tobytes()
        await asyncio.to_thread(_update, engine, tensors, 1)
        reply = await engine.generate(request("r"))
        assert (reply.finish.type, reply.output_ids) == ("abort", ())
        assert "not finite" in reply.finish.message


def _update(engine: LocalEngine, tensors: dict[str, Any], version: int) -> None:
    engine.port.pause("retract")
    engine.port.flush()
    engine.port.begin(f"v{version}", version)
    engine.port.load(tensors)
    engine.port.commit(version, "")
    engine.port.resume()


async def test_updates_under_load_lose_no_request(
    engine: LocalEngine, dense_folder: Path, dense_folder_next: Path
) -> None:
    requests = [request(f"r{i}", seed=i, length=10 + i, new=60) for i in range(16)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    await until(lambda: engine.stats().running == 16)
    for version, folder in ((1, dense_folder_next), (2, dense_folder)):
        await until(lambda v=version: engine.stats().generated_tokens > 100 * v)  # type: ignore[misc]
        await asyncio.to_thread(_update, engine, checkpoint_tensors(folder), version)
    replies = await asyncio.gather(*tasks)
    assert {len(reply.output_ids) for reply in replies} == {60}
    for reply in replies:
        versions = [version for _, version in reply.weight_version_spans]
        assert versions == sorted(versions)
        assert versions[-1] == 2


async def test_poison_answers_everyone(engine: LocalEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(request(f"r{i}", new=400))) for i in range(3)]
    await until(lambda: engine.stats().running == 3)
    await asyncio.to_thread(engine.port.poison, "a digest differed")
    outcomes = await asyncio.gather(*tasks, engine.generate(request("late")), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EnginePoisonedError] * 4


async def test_closing_answers_everyone(dense_folder: Path) -> None:
    engine = LocalEngine(dense_folder, EngineConfig(max_context=512))
    engine.start()
    task = asyncio.create_task(engine.generate(request("r", new=450)))
    await until(lambda: engine.stats().running == 1)
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineClosedError):
        await task
    with pytest.raises(EngineClosedError):
        await engine.generate(request("late"))
    with pytest.raises(EngineClosedError):
        engine.port.describe()


INVALID: dict[str, EngineRequest] = {
    "empty_input": EngineRequest(()),
    "token_out_of_range": EngineRequest((1, 259)),
    "context_too_long": EngineRequest((1,) * 100, SamplingParams(max_new_tokens=413)),
    "invalid_sampling": EngineRequest((1,), SamplingParams(temperature=float("nan"))),
    "invalid_logprob_start": EngineRequest((1, 2), logprob_start_len=2),
}


@pytest.mark.parametrize("code", sorted(INVALID))
async def test_unsound_requests_are_refused_at_the_door(engine: LocalEngine, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        await engine.generate(INVALID[code])
    assert refused.value.code == code
    assert isinstance(await engine.generate(request("fine")), EngineReply)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=-1.0),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.1),
        SamplingParams(top_k=0),
        SamplingParams(max_new_tokens=-1),
        SamplingParams(sampling_seed=-1),
        SamplingParams(sampling_seed=1 << 64),
        SamplingParams(stop=("",)),
    ],
)
async def test_sampling_parameters_out_of_range_are_refused(engine: LocalEngine, sampling: SamplingParams) -> None:
    with pytest.raises(RequestError, match="out of range"):
        await engine.generate(EngineRequest((1,), sampling))
