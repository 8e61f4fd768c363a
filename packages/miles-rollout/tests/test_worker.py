"""The worker under virtual time: what it submits, hands out, retries and reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from miles_rollout import Ledger, Prompt, PromptSource, RolloutWorker, derive_seed
from miles_rollout.config import BufferConfig, DataConfig, WorkerConfig
from miles_rollout.errors import (
    ConsecutiveFailuresError,
    FilterRejectsEverythingError,
    PluginError,
    PromptsExhaustedError,
    StallError,
)
from miles_rollout.history import check_history
from miles_rollout.testing import FakeSessions, FakeTrajectory, LabelGrader, MemoryEvents, run_virtual


class Unversioned(FakeSessions):
    """Collects trajectories that do not know their versions."""

    async def collect(self, session_id: str) -> list[FakeTrajectory]:
        return [FakeTrajectory(versions=())]


class Rig:
    """A worker over fakes, with a version that the test moves."""

    def __init__(
        self,
        *,
        prompts: int = 8,
        seconds: Mapping[int, float] | None = None,
        worker: dict[str, Any] | None = None,
        buffer: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        agent: Any = None,
        grader: Any = None,
        sessions: dict[str, Any] | None = None,
        make_sessions: type[FakeSessions] = FakeSessions,
        fatal: tuple[type[BaseException], ...] = (),
        version: int = 0,
    ) -> None:
        self.version = version
        self.events = MemoryEvents()
        self.sessions = make_sessions(lambda: self.version, **(sessions or {}))
        config = WorkerConfig(**{"batch_groups": 2, "group_size": 2, **(worker or {})})
        limits = BufferConfig(**(buffer or {}))
        pace = seconds or {}
        self.source = PromptSource(
            [
                Prompt(f"p{i}", [{"role": "user", "content": "?"}], 1.0, {"seconds": pace.get(i, 1.0)})
                for i in range(prompts)
            ],
            DataConfig(**(data or {})),
        )
        self.ledger = Ledger(self.events, max_staleness=limits.max_staleness)
        self.worker = RolloutWorker(
            config,
            limits,
            source=self.source,
            ledger=self.ledger,
            sessions=self.sessions,
            agent=agent(self.sessions) if agent else self.sessions.one_turn,
            grader=grader or LabelGrader(),
            run_seed=7,
            version=lambda: self.version,
            fatal_errors=fatal,
        )

    def update(self) -> None:
        self.version += 1
        self.ledger.record_update(self.version, f"digest {self.version}")
        self.worker.notify_version()

    async def steps(self, count: int, *, train_s: float = 0.5) -> list[list[str]]:
        """Train: batch, wait, settle, update, close. Returns the prompt ids of each step."""
        trained = []
        for step in range(count):
            batch = await self.worker.next_batch()
            await asyncio.sleep(train_s)
            self.worker.record_trained(batch, step, version=self.version)
            self.update()
            self.worker.close_step(step)
            trained.append([group.prompt_id for group in batch])
        return trained


def chain(batches: list[list[str]]) -> list[str]:
    return [prompt_id for batch in batches for prompt_id in batch]


def hanging(ids: set[str]) -> Any:
    """An agent that never returns on some prompts."""

    def make(sessions: FakeSessions) -> Any:
        async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
            if sessions.open[base_url.rpartition("/")[2]].metadata["prompt_id"] in ids:
                await asyncio.Event().wait()
            await sessions.one_turn(base_url, prompt, request_kwargs, metadata)

        return agent

    return make


def failing(error: BaseException, ids: set[str] | None = None, *, tries: int = 99) -> Any:
    """An agent that raises before its first turn, on some prompts and for the first attempts."""

    def make(sessions: FakeSessions) -> Any:
        async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
            session = sessions.open[base_url.rpartition("/")[2]].metadata
            if (ids is None or session["prompt_id"] in ids) and session["attempt"] < tries:
                raise error
            await sessions.one_turn(base_url, prompt, request_kwargs, metadata)

        return agent

    return make


def test_batches_come_in_draw_order_and_the_ledger_closes_each_step() -> None:
    async def main() -> None:
        rig = Rig(seconds={0: 1.5})
        async with rig.worker:
            assert await rig.steps(4) == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6", "p7"]]
        history = check_history(rig.events.events)
        assert history.sound
        assert history.outcomes == {"trained": 8}

    run_virtual(main())


def test_seeds_follow_from_names() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.worker:
            [first, _] = await rig.worker.next_batch()
        assert [member.seed for member in first.members] == [derive_seed(7, "p0", 0, 0), derive_seed(7, "p0", 0, 1)]

    run_virtual(main())


def test_generation_goes_on_while_the_trainer_steps() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.worker:
            await rig.worker.next_batch()
            await asyncio.sleep(10)
            assert len(rig.worker.holdings().buffered) == 4

    run_virtual(main())


def test_every_session_is_deleted_even_those_of_members_that_hang() -> None:
    async def main() -> None:
        rig = Rig(agent=hanging({"p1"}), worker={"group_timeout_s": 5.0, "max_tries": 1})
        async with rig.worker:
            await rig.worker.next_batch(4)
        assert rig.sessions.open == {}
        assert len(rig.sessions.deleted) == len(rig.sessions.created)

    run_virtual(main())


def test_a_hanging_group_frees_its_slots_at_its_deadline_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        rig = Rig(
            agent=hanging({"p0", "p1", "p2", "p3"}),
            worker={"group_timeout_s": 60.0, "failure_policy": "drop", "max_consecutive_failures": 9},
        )
        async with rig.worker:
            batch = await rig.worker.next_batch()
            assert [group.prompt_id for group in batch] == ["p4", "p5"]
            assert asyncio.get_running_loop().time() < 200

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert "group 0 (prompt 'p0' of epoch 0, attempt 0) is past its deadline of 60.0 s" in caplog.text


def test_a_stuck_prompt_is_tried_three_times_then_dropped_with_its_id() -> None:
    async def main() -> None:
        rig = Rig(agent=hanging({"p0"}), worker={"group_timeout_s": 5.0}, data={"epochs": 1})
        async with rig.worker:
            trained = [group async for batch in rig.worker.batches(1) for group in batch]
        assert [group.prompt_id for group in trained if group.prompt_id == "p0"] == []
        assert [entry["attempt"] for entry in rig.sessions.created if entry["prompt_id"] == "p0"] == [0, 0, 1, 1, 2, 2]
        assert rig.ledger.counts()["drop/generation_failed"] == 3
        assert {"kind": "settle", "outcome": "dropped", "prompt_id": "p0"}.items() <= rig.events.events[
            [e["kind"] == "settle" and e["prompt_id"] == "p0" for e in rig.events.events].index(True)
        ].items()

    run_virtual(main())


def test_an_agent_that_ignores_its_cancellation_is_abandoned() -> None:
    def make(sessions: FakeSessions) -> Any:
        async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
            if sessions.open[base_url.rpartition("/")[2]].metadata["prompt_id"] != "p0":
                return await sessions.one_turn(base_url, prompt, request_kwargs, metadata)
            ends = asyncio.get_running_loop().time() + 1000
            while asyncio.get_running_loop().time() < ends:
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    continue
            return None

        return agent

    async def main() -> None:
        rig = Rig(agent=make, worker={"group_timeout_s": 5.0, "cancel_grace_s": 2.0, "max_tries": 1, "group_size": 1})
        async with rig.worker:
            await asyncio.sleep(10)
            assert rig.worker.get_metrics()["rollout/fully_async/abandoned_members"] == 1
            await rig.worker.next_batch(4)
            await asyncio.sleep(2000)

    run_virtual(main())


def test_a_retry_starts_clean_with_a_fresh_session_and_seed() -> None:
    async def main() -> None:
        rig = Rig(agent=failing(RuntimeError("no environment"), {"p0"}, tries=1))
        async with rig.worker:
            first = (await rig.worker.next_batch(4))[0]
        assert (first.prompt_id, first.attempt) == ("p0", 1)
        assert [member.seed for member in first.members] == [derive_seed(7, "p0", 1, 0), derive_seed(7, "p0", 1, 1)]
        assert all(member.trajectory.versions == (0,) for member in first.members)
        assert len({entry["session_id"] for entry in rig.sessions.created}) == len(rig.sessions.created)

    run_virtual(main())


def test_an_agents_error_is_recorded_and_what_it_did_is_kept() -> None:
    def make(sessions: FakeSessions) -> Any:
        async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
            sessions.turn(base_url)
            raise ValueError("the tool broke")

        return agent

    async def main() -> None:
        rig = Rig(agent=make)
        async with rig.worker:
            [first, _] = await rig.worker.next_batch()
        assert first.members[0].metadata == {"agent_error": "ValueError: the tool broke"}
        assert first.members[0].trajectory.reward == 1.0
        assert rig.worker.get_metrics()["agent/error_count"] >= 4

    run_virtual(main())


def test_what_the_agent_returns_is_kept_and_its_reward_wins() -> None:
    def make(sessions: FakeSessions) -> Any:
        async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
            assert request_kwargs == {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 5}
            assert metadata["max_seq_len"] == 99
            assert metadata["session_server_id"] == "127.0.0.1:9"
            sessions.turn(base_url)
            return {"reward": 0.25, "exit_status": "done"}

        return agent

    async def main() -> None:
        sampling = {"temperature": 0.7, "max_new_tokens": 5}
        rig = Rig(agent=make, worker={"sampling": sampling, "max_seq_len": 99})
        async with rig.worker:
            [first, _] = await rig.worker.next_batch()
        member = first.members[0]
        assert (member.reward, member.reason) == (0.25, "agent")
        assert member.metadata["exit_status"] == "done"

    run_virtual(main())


def test_a_late_session_costs_one_group_not_the_run() -> None:
    async def late(metadata: Mapping[str, Any]) -> None:
        if (metadata["prompt_id"], metadata["member"], metadata["attempt"]) == ("p1", 0, 0):
            await asyncio.sleep(10_000)

    async def main() -> None:
        rig = Rig(sessions={"before_create": late}, data={"epochs": 1})
        async with rig.worker:
            trained = await rig.steps(4)
        assert sorted(chain(trained)) == [f"p{i}" for i in range(8)]

    run_virtual(main())


def test_a_late_collect_fails_the_group() -> None:
    async def late(metadata: Mapping[str, Any]) -> None:
        if metadata["attempt"] == 0 and metadata["prompt_id"] == "p0":
            await asyncio.sleep(10_000)

    async def main() -> None:
        rig = Rig(sessions={"before_collect": late})
        async with rig.worker:
            await rig.worker.next_batch(8)
            assert rig.worker.get_metrics()["rollout/fully_async/retried_groups"] == 1

    run_virtual(main())


def test_a_member_that_cancels_itself_ends_as_failed() -> None:
    async def main() -> None:
        rig = Rig(agent=failing(asyncio.CancelledError(), {"p0"}, tries=1))
        async with rig.worker:
            await rig.worker.next_batch(4)
            assert rig.worker.get_metrics()["rollout/fully_async/failed_groups"] == 1

    run_virtual(main())


def test_failures_in_a_row_end_the_run_with_the_first_trace() -> None:
    async def main() -> None:
        rig = Rig(agent=failing(ConnectionError("engine is gone")), worker={"max_consecutive_failures": 4})
        async with rig.worker:
            with pytest.raises(
                ConsecutiveFailuresError, match=r"4 prompts failed in a row[\s\S]*engine is gone"
            ) as caught:
                await rig.worker.next_batch()
            assert isinstance(caught.value.__cause__, ConnectionError)

    run_virtual(main())


def test_the_policy_fail_raises_the_groups_own_error() -> None:
    async def main() -> None:
        error = ConnectionError("engine is gone")
        rig = Rig(agent=failing(error), worker={"failure_policy": "fail"})
        async with rig.worker:
            with pytest.raises(ConnectionError) as caught:
                await rig.worker.next_batch()
            assert caught.value is error

    run_virtual(main())


def test_a_fatal_error_ends_the_run_at_once_even_if_groups_are_queued() -> None:
    class Identity(Exception):
        pass

    error = Identity("token 7 of session s1 differs")

    async def violated(metadata: Mapping[str, Any]) -> None:
        if metadata["prompt_id"] == "p3":
            raise error

    async def main() -> None:
        rig = Rig(sessions={"before_collect": violated}, fatal=(Identity,))
        async with rig.worker:
            await asyncio.sleep(5)
            assert rig.worker.failure is error
            with pytest.raises(Identity) as caught:
                await rig.worker.next_batch()
            assert caught.value is error
        assert rig.sessions.open == {}

    run_virtual(main())


def test_a_filter_that_rejects_everything_ends_the_run_with_advice() -> None:
    async def main() -> None:
        rig = Rig(buffer={"filter": "nonzero_std"}, worker={"max_consecutive_rejects": 10})
        async with rig.worker:
            with pytest.raises(
                FilterRejectsEverythingError, match=r"rejected 10 groups in a row, the last for zero_std_1.0"
            ):
                await rig.worker.next_batch()

    run_virtual(main())


def test_the_end_of_the_data_gives_a_short_batch_and_then_an_error() -> None:
    async def main() -> None:
        rig = Rig(prompts=3, data={"epochs": 1})
        async with rig.worker:
            assert [len(batch) async for batch in rig.worker.batches()] == [2, 1]
            with pytest.raises(PromptsExhaustedError):
                await rig.worker.next_batch()

    run_virtual(main())


def test_a_slow_prompt_is_dropped_as_stale_under_discard_and_the_bias_is_reported() -> None:
    async def main() -> None:
        rig = Rig(prompts=400, seconds={0: 10.0}, buffer={"max_staleness": 2}, data={"epochs": 1})
        async with rig.worker:
            trained = await rig.steps(10, train_s=0.0)
            metrics = rig.worker.get_metrics()
        assert "p0" not in chain(trained)
        assert metrics["rollout/fully_async/stale_groups_filtered"] == 1
        assert metrics["rollout/fully_async/dropped_avg_staleness"] > 2
        assert metrics["rollout/fully_async/dropped_avg_tokens"] == 8

    run_virtual(main())


def test_a_slow_prompt_is_trained_under_admit_and_nothing_is_thrown_away() -> None:
    async def main() -> None:
        rig = Rig(
            prompts=400, seconds={0: 10.0, 9: 7.0}, worker={"staleness_policy": "admit"}, buffer={"max_staleness": 2}
        )
        async with rig.worker:
            trained = await rig.steps(12, train_s=0.0)
        history = check_history(rig.events.events)
        assert "p0" in chain(trained)
        assert history.sound
        assert history.max_trained_staleness is not None
        assert history.max_trained_staleness <= 2
        assert history.drop_reasons == {}

    run_virtual(main())


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_admission_bounds_what_is_submitted(limit: int) -> None:
    async def main() -> None:
        rig = Rig(
            prompts=400,
            worker={"staleness_policy": "admit", "max_concurrent_samples": 100},
            buffer={"max_staleness": limit},
        )
        async with rig.worker:
            await asyncio.sleep(50)
            assert len({entry["prompt_id"] for entry in rig.sessions.created}) == (limit + 1) * 2
            trained = await rig.steps(5)
        assert [len(batch) for batch in trained] == [2] * 5
        assert check_history(rig.events.events).drop_reasons == {}

    run_virtual(main())


def test_limit_zero_under_admit_is_synchronous() -> None:
    async def main() -> None:
        rig = Rig(worker={"staleness_policy": "admit"}, buffer={"max_staleness": 0})
        async with rig.worker:
            await rig.steps(4)
        history = check_history(rig.events.events)
        assert history.max_trained_staleness == 0
        assert history.outcomes == {"trained": 8}

    run_virtual(main())


def test_a_dropped_group_gives_its_admission_back() -> None:
    async def main() -> None:
        rig = Rig(
            prompts=40,
            agent=failing(RuntimeError("x"), {f"p{i}" for i in range(0, 40, 3)}),
            worker={"staleness_policy": "admit", "failure_policy": "drop", "max_consecutive_failures": 50},
            buffer={"max_staleness": 0},
        )
        async with rig.worker:
            trained = await rig.steps(8)
        assert [len(batch) for batch in trained] == [2] * 8

    run_virtual(main())


def test_a_resumed_run_begins_with_as_many_admitted_as_were_trained() -> None:
    async def main() -> None:
        rig = Rig(prompts=400, worker={"staleness_policy": "admit"}, buffer={"max_staleness": 0}, version=7)
        async with rig.worker:
            await asyncio.sleep(20)
            assert len({entry["prompt_id"] for entry in rig.sessions.created}) == 2

    run_virtual(main())


def test_submissions_stop_and_finished_groups_are_buffered_during_evaluation() -> None:
    async def main() -> None:
        rig = Rig(prompts=100)
        async with rig.worker:
            await asyncio.sleep(0.5)
            async with rig.worker.paused_submissions():
                before = len(rig.sessions.created)
                held_out = [Prompt(f"e{i}", [{"role": "user", "content": "?"}], 0.5) for i in range(5)]
                results = await rig.worker.evaluate(held_out, seed=3, request_kwargs={"temperature": 0.0})
                evaluated = rig.sessions.created[before:]
                assert [result.reward for result in results] == [0.5] * 5
                assert {entry["sampling"]["temperature"] for entry in evaluated} == {0.0}
                assert [entry["seed"] for entry in evaluated] == [derive_seed(3, f"e{i}", 0, 0) for i in range(5)]
                await asyncio.sleep(60)
                assert len(rig.sessions.created) == before + 5
                assert len(rig.worker.holdings().buffered) == 2
            await rig.worker.next_batch(6)

    run_virtual(main())


def test_evaluation_may_run_while_the_worker_generates() -> None:
    async def main() -> None:
        rig = Rig(prompts=100)
        async with rig.worker:
            prompts = [Prompt("e", [{"role": "user", "content": "?"}], 1.0)]
            results, batch = await asyncio.gather(
                rig.worker.evaluate(prompts, seed=1, samples_per_prompt=8), rig.worker.next_batch()
            )
            assert len(results) == 8
            assert len(batch) == 2

    run_virtual(main())


def test_a_hanging_evaluation_sample_is_aborted_at_the_deadline() -> None:
    async def main() -> None:
        rig = Rig(agent=hanging({"e"}), worker={"group_timeout_s": 5.0})
        async with rig.worker:
            [result] = await rig.worker.evaluate([Prompt("e", [{"role": "user", "content": "?"}])], seed=1)
        assert (result.reward, result.member.status) == (None, "aborted")

    run_virtual(main())


def test_silence_is_reported_with_the_oldest_group_and_ends_at_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        rig = Rig(agent=hanging({f"p{i}" for i in range(8)}), worker={"no_progress_timeout_s": 90.0})
        async with rig.worker:
            with pytest.raises(StallError, match=r"No completed rollout groups for 90\.0s"):
                await rig.worker.next_batch()

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    first = next(record.message for record in caplog.records if "No completed" in record.message)
    assert first == (
        "No completed rollout groups for 30.0s: the oldest is group 0 (prompt 'p0' of epoch 0, attempt 0), 30.0s old; "
        "2 groups with 4 samples in flight, 0 waiting to be put, 0 queued"
    )


def test_a_full_buffer_holds_submissions_back_and_loses_nothing() -> None:
    async def main() -> None:
        rig = Rig(prompts=100, buffer={"capacity_factor": 1.0, "max_staleness": None})
        async with rig.worker:
            await asyncio.sleep(100)
            held = rig.worker.holdings()
            assert len(held.buffered) == 2
            assert len(held.in_flight) <= 4
            trained = await rig.steps(4)
        assert chain(trained) == [f"p{i}" for i in range(8)]

    run_virtual(main())


def test_a_cancelled_batch_loses_no_group() -> None:
    async def main() -> None:
        rig = Rig(prompts=100)
        async with rig.worker:
            for pause in (0.2, 0.9, 1.1, 2.0):
                waiting = asyncio.create_task(rig.worker.next_batch(4))
                await asyncio.sleep(pause)
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():
                    rig.worker.record_trained(waiting.result(), 0)
                rig.worker.close_step(0)

    run_virtual(main())


def test_a_trajectory_without_versions_fails_its_group() -> None:
    async def main() -> None:
        rig = Rig(make_sessions=Unversioned)
        async with rig.worker:
            with pytest.raises(ConsecutiveFailuresError, match="a trajectory has no weight versions"):
                await rig.worker.next_batch()

    run_virtual(main())


def test_an_agent_with_the_wrong_signature_is_refused() -> None:
    async def two(base_url: str, prompt: Any) -> None: ...

    with pytest.raises(PluginError, match=r"agent\(base_url, prompt, request_kwargs, metadata\)"):
        Rig(agent=lambda sessions: two)


def test_a_frontier_serves_what_was_neither_trained_nor_dropped() -> None:
    async def main() -> None:
        rig = Rig(seconds={4: 1000.0, 5: 1000.0}, worker={"max_concurrent_samples": 100, "batch_groups": 2})
        async with rig.worker:
            await rig.steps(1)
            await asyncio.sleep(3)
            frontier = rig.source.frontier()
        resumed = PromptSource([Prompt(f"p{i}", [{"role": "user", "content": "?"}]) for i in range(8)], DataConfig())
        resumed.load_frontier(frontier)
        drawn = [draw.prompt.prompt_id for draw in resumed.draw_many(6)]
        assert sorted(drawn) == [f"p{i}" for i in range(2, 8)]

    run_virtual(main())
