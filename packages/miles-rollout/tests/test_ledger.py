"""The ledger: legal moves, closing, and exactly one outcome a prompt under random faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rollout import Draw, Drop, DropReason, Group, Ledger, Prompt, PromptKey, PromptSource, RolloutWorker
from miles_rollout.config import BufferConfig, DataConfig, WorkerConfig
from miles_rollout.errors import LedgerError
from miles_rollout.history import check_history
from miles_rollout.testing import FakeSessions, LabelGrader, MemoryEvents, run_virtual

PROMPTS = [Prompt(f"p{i}", [{"role": "user", "content": "?"}], 1.0) for i in range(200)]
KEY = PromptKey("p0", 0)
GROUP = Group("p0", 0, 0, 0, ())


def drawn(*, until: str = "handed out") -> Ledger:
    ledger = Ledger()
    moves = {
        "drawn": lambda: ledger.record_draw(Draw(PROMPTS[0], 0, 0)),
        "in flight": lambda: ledger.record_submit(KEY),
        "buffered": lambda: ledger.record_put(GROUP),
        "handed out": lambda: ledger.record_get(GROUP, version=0),
    }
    for name, move in moves.items():
        move()
        if name == until:
            break
    return ledger


def test_a_prompt_that_was_not_handed_out_cannot_be_trained() -> None:
    with pytest.raises(LedgerError, match="prompt 'p0' of epoch 0 \\(group 0\\) is buffered; it must be handed out"):
        drawn(until="buffered").record_trained([KEY], 0)


def test_a_prompt_cannot_be_trained_twice() -> None:
    ledger = drawn()
    ledger.record_trained([KEY], 0)
    with pytest.raises(LedgerError, match="is settled already: it was trained"):
        ledger.record_trained([KEY], 1)


def test_a_batch_that_names_a_prompt_twice_records_nothing() -> None:
    ledger = drawn()
    with pytest.raises(LedgerError, match="more than once"):
        ledger.record_trained([KEY, KEY], 0)
    assert ledger.counts()["trained"] == 0


def test_an_unknown_prompt_cannot_be_trained() -> None:
    with pytest.raises(LedgerError, match="was never drawn"):
        Ledger().record_trained([KEY], 0)


@pytest.mark.parametrize("state", ["drawn", "in flight", "buffered", "handed out"])
def test_a_prompt_that_nobody_holds_is_named(state: str) -> None:
    with pytest.raises(LedgerError, match=r"does not close at step 3: 1 prompts \['p0' of epoch 0\] should be"):
        drawn(until=state).close(3, in_flight=[], buffered=[], returned=[])


def test_a_prompt_that_the_ledger_does_not_know_is_named() -> None:
    with pytest.raises(LedgerError, match=r"\['p0' of epoch 0\] are unaccounted for \(buffered\)"):
        Ledger().close(0, in_flight=[], buffered=[KEY], returned=[])


def test_a_batch_still_in_training_can_be_declared() -> None:
    drawn().close(0, in_flight=[], buffered=[], returned=[], handed_out=[KEY])


def test_a_returned_prompt_is_open_and_settles_once() -> None:
    ledger = drawn(until="in flight")
    ledger.record_returned(KEY, Drop(DropReason.GENERATION_FAILED, "timeout"))
    ledger.close(0, in_flight=[], buffered=[], returned=[KEY])
    ledger.record_draw(Draw(PROMPTS[0], 0, 0, attempt=1))
    ledger.record_dropped(KEY, Drop(DropReason.GENERATION_FAILED, "timeout"))
    with pytest.raises(LedgerError, match="it was dropped already"):
        ledger.record_draw(Draw(PROMPTS[0], 0, 0, attempt=2))
    assert ledger.counts()["drop/generation_failed"] == 2
    ledger.close(1, in_flight=[], buffered=[], returned=[])


class Faulty:
    """Random faults on every call, all from one seed: late and failing creates, collects and agents, and rewards."""

    def __init__(self, seed: int, rate: float, version: Any) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self.sessions = FakeSessions(version, before_create=self._fault, before_collect=self._fault)

    async def _fault(self, metadata: Mapping[str, Any]) -> None:
        await asyncio.sleep(self._random.random())
        if self._random.random() < self._rate:
            await asyncio.sleep(self._random.choice([0, 50, 10_000]))
            raise self._random.choice([TimeoutError, ConnectionError, ValueError])("injected")

    async def agent(self, base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any] | None:
        await asyncio.sleep(self._random.expovariate(1.0))
        if self._random.random() < self._rate:
            await self._fault(metadata)
        if self._random.random() < self._rate:
            raise asyncio.CancelledError
        status = "aborted" if self._random.random() < self._rate else "completed"
        self.sessions.turn(base_url, status=status)  # type: ignore[arg-type]
        return {"reward": float(self._random.random() < 0.5)}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from([0.0, 0.05, 0.3]),
    policy=st.sampled_from(["discard", "admit"]),
    unused=st.sampled_from(["drop", "retry"]),
    limit=st.sampled_from([0, 1, 2]),
    accept=st.sampled_from([None, "nonzero_std"]),
    restarts=st.integers(0, 2),
)
def test_every_prompt_of_every_epoch_settles_exactly_once(
    seed: int, rate: float, policy: str, unused: str, limit: int, accept: str | None, restarts: int
) -> None:
    run_virtual(run_epochs(seed, rate, policy, unused, limit, accept, restarts, PROMPTS[:6]))


@pytest.mark.parametrize("policy", ["discard", "admit"])
def test_two_hundred_prompts_three_epochs_and_two_restarts_settle_exactly_once(policy: str) -> None:
    run_virtual(run_epochs(11, 0.1, policy, "retry", 1, None, 2, PROMPTS))


async def run_epochs(
    seed: int,
    rate: float,
    policy: str,
    unused: str,
    limit: int,
    accept: str | None,
    restarts: int,
    prompts: list[Prompt],
) -> None:
    """Three epochs over the prompts, cut into lives by restarts from the frontier; the ledger closes at each step."""
    data = DataConfig(shuffle=True, seed=seed % 100, epochs=3)
    outcomes: list[tuple[PromptKey, str]] = []
    frontier, versions = None, [0]
    for life in range(restarts + 1):
        events = MemoryEvents()
        source = PromptSource(prompts, data)
        if frontier is not None:
            source.load_frontier(frontier)
        faulty = Faulty(seed + life, rate, lambda: versions[-1])
        ledger = Ledger(events, max_staleness=limit)
        worker = RolloutWorker(
            WorkerConfig(
                batch_groups=2,
                group_size=2,
                staleness_policy=policy,  # type: ignore[arg-type]
                group_timeout_s=100.0,
                max_consecutive_failures=1000,
                max_consecutive_rejects=0,
            ),
            BufferConfig(max_staleness=limit, unused_handler=unused, filter=accept),  # type: ignore[arg-type]
            source=source,
            ledger=ledger,
            sessions=faulty.sessions,
            agent=faulty.agent,
            grader=LabelGrader(),
            run_seed=seed,
            version=lambda: versions[-1],
        )
        steps = 10**9 if life == restarts else 1 + seed % 3
        async with worker:
            step = 0
            async for batch in worker.batches():
                await asyncio.sleep(0.3)
                worker.record_trained(batch, step, version=versions[-1])
                versions.append(versions[-1] + 1)
                ledger.record_update(versions[-1], f"digest {versions[-1]}")
                worker.notify_version()
                worker.close_step(step)
                step += 1
                if step == steps:
                    break
            worker.close_step(step)
        frontier = source.frontier()
        history = check_history(events.events, finished=life == restarts)
        assert history.faults == ()
        outcomes += [
            (PromptKey(event["prompt_id"], event["epoch"]), event["outcome"])
            for event in events.events
            if event["kind"] == "settle"
        ]
    assert sorted(key for key, _ in outcomes) == sorted(PromptKey(p.prompt_id, e) for p in prompts for e in range(3))
    assert faulty.sessions.open == {}
