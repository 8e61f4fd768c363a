"""The asynchronous rollout worker: keeps groups under way, fills the buffer, hands out batches.

Everything runs on one event loop. A group's task carries it from its members to the buffer, so finished groups are
taken in while others wait for room. Nothing new is submitted while a group waits for room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from miles_rollout import evaluation
from miles_rollout.agents import check_agent
from miles_rollout.buffer import AcceptHandler, Buffer, DropHandler, GroupBuffer, VersionProvider
from miles_rollout.buffer_window import PREFIX
from miles_rollout.config import BufferConfig, RolloutConfig, WorkerConfig
from miles_rollout.data.prompts import Draw, Prompt, PromptKey
from miles_rollout.data.source import PromptSource
from miles_rollout.drops import Drop, DropReason
from miles_rollout.episodes import Episode, EpisodeRunner, FatalErrors
from miles_rollout.errors import (
    PromptsExhaustedError,
    StallError,
)
from miles_rollout.evaluation import EvalResult
from miles_rollout.group_run import GroupRunner, RunningGroup
from miles_rollout.groups import Group
from miles_rollout.ledger import Holdings, Ledger
from miles_rollout.protocols import Agent, Grader, SessionClient
from miles_rollout.schedule import Admission, SubmissionSlots
from miles_rollout.seeds import member_seed
from miles_rollout.settlement import Settlement
from miles_rollout.streaks import Streaks

logger = logging.getLogger(__name__)


class BufferFactory(Protocol):
    """Makes the buffer of a worker; `GroupBuffer` is one."""

    def __call__(
        self,
        config: BufferConfig,
        *,
        batch_groups: int,
        version: VersionProvider,
        on_drop: DropHandler,
        on_accept: AcceptHandler,
        oldest_first: bool,
        capacity_groups: int | None,
    ) -> Buffer: ...


class RolloutWorker:
    """Draws prompts, runs each member on a session, grades, buffers, and hands out batches in draw order.

    Args:
        config: the worker's section, and `buffer`, the buffer's.
        source: where prompts come from; the worker alone draws from it.
        ledger: follows every drawn prompt.
        sessions, agent, grader: the outside. The agent's own reward beats the grader's; one of the two must give one.
        run_seed: from which every trajectory's seed is derived.
        version: the weight version of the engines now. Call `notify_version` when it changed.
        fatal_errors: error types that end the run at once, with that very error.
    """

    def __init__(
        self,
        config: WorkerConfig,
        buffer: BufferConfig,
        *,
        source: PromptSource,
        ledger: Ledger,
        sessions: SessionClient,
        agent: Agent,
        grader: Grader | None,
        run_seed: int,
        version: VersionProvider,
        fatal_errors: FatalErrors = (),
        make_buffer: BufferFactory = GroupBuffer,
    ) -> None:
        RolloutConfig(worker=config, buffer=buffer)
        self._config = config
        self._source = source
        self._ledger = ledger
        self._run_seed = run_seed
        self._version = version
        self._sampling = config.sampling.model_dump(exclude_none=True)
        self._limit = buffer.max_staleness if config.staleness_policy == "admit" else None
        self._settlement = self._make_settlement(buffer)
        self.buffer = self._make_buffer(buffer, make_buffer)
        self._episodes = EpisodeRunner(
            config, sessions=sessions, agent=check_agent(agent), grader=grader, fatal=fatal_errors
        )
        self._runner = GroupRunner(timeout_s=config.group_timeout_s, grace_s=config.cancel_grace_s)
        self._slots = SubmissionSlots(
            budget_groups=config.in_flight_groups, group_size=config.group_size, granularity=config.granularity
        )
        self._running: dict[PromptKey, RunningGroup] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._change = asyncio.Event()
        self._consumer = asyncio.Lock()
        self._pauses = 0
        self._failure: BaseException | None = None
        self._streaks = Streaks(config)
        self._progress_s = 0.0

    async def start(self) -> None:
        """Begin to submit groups."""
        self._progress_s = asyncio.get_running_loop().time()
        self._spawn(self._submit_forever)

    async def close(self) -> None:
        """Cancel what is under way and wait until it has ended. Unsettled prompts stay in the source's frontier."""
        for task in self._tasks:
            if not task.cancelling():
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._episodes.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the worker, if one did."""
        return self._failure

    def notify_version(self) -> None:
        """The engines have a new version: what admission or a waiting batch depends on is looked at again."""
        self._changed()

    async def next_batch(self, n_groups: int | None = None) -> list[Group]:
        """The next groups, by default one batch, in draw order, none stale at the moment of return.

        At the end of the data a batch may be short.

        Raises:
            PromptsExhaustedError: nothing is left.
            StallError: no group was completed for `no_progress_timeout_s`.
            BaseException: the very error that ended the worker, even if groups are queued.
        """
        async with self._consumer:
            groups = await self._drain(self._config.batch_groups if n_groups is None else n_groups)
            for group in groups:
                self._ledger.record_get(group, version=self._version())
        self._changed()
        if not groups:
            raise PromptsExhaustedError(f"all {len(self._source)} prompts of every epoch have their outcome")
        return sorted(groups, key=lambda group: group.group_id)

    async def batches(self, n_groups: int | None = None) -> AsyncIterator[list[Group]]:
        """Batches until the data ends."""
        while True:
            try:
                batch = await self.next_batch(n_groups)
            except PromptsExhaustedError:
                return
            yield batch

    def record_trained(self, groups: Sequence[Group], step: int, *, version: int | None = None) -> None:
        """These groups were trained on in `step`. Raises LedgerError unless each was handed out and not trained."""
        self._settlement.train(list(groups), step, version=version)

    def close_step(self, step: int, *, handed_out: Sequence[PromptKey] = ()) -> None:
        """Close the ledger against what is really held. Raises LedgerError."""
        held = self.holdings()
        self._ledger.close(
            step, in_flight=held.in_flight, buffered=held.buffered, returned=held.returned, handed_out=handed_out
        )

    def holdings(self) -> Holdings:
        """The prompts held now: under way or waiting for room, in the buffer, and given back to the source."""
        return Holdings(
            in_flight=frozenset(self._running),
            buffered=frozenset(group.key for group in self.buffer.groups()),
            returned=self._source.returned,
        )

    @asynccontextmanager
    async def paused_submissions(self) -> AsyncIterator[None]:
        """Submit nothing inside the block, entered when no member is under way. Finished groups are still buffered."""
        self._pauses += 1
        try:
            while self._slots.samples:
                await self._until_changed()
            yield
        finally:
            self._pauses -= 1
            self._changed()

    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        request_kwargs: Mapping[str, Any] | None = None,
        samples_per_prompt: int = 1,
    ) -> list[EvalResult]:
        """Run prompts on the same session path, outside buffer and ledger; `request_kwargs` go over the sampling."""
        return await evaluation.evaluate(
            self._episodes,
            self._runner,
            prompts,
            sampling={**self._sampling, **(request_kwargs or {})},
            seed=seed,
            samples_per_prompt=samples_per_prompt,
            concurrency=self._config.eval_concurrency,
        )

    def get_metrics(self) -> dict[str, float]:
        """The metrics of this training step: the buffer's window, and what is under way."""
        now = asyncio.get_running_loop().time()
        ages = [now - run.began_s for run in self._running.values()]
        return {
            **self.buffer.get_metrics(),
            f"{PREFIX}/in_flight_groups": len(self._running),
            f"{PREFIX}/in_flight_samples": self._slots.samples,
            f"{PREFIX}/oldest_in_flight_seconds": max(ages, default=0.0),
            f"{PREFIX}/failed_groups": self._settlement.counts.pop("failed_groups", 0),
            f"{PREFIX}/retried_groups": self._settlement.counts.pop("retried_groups", 0),
            "agent/error_count": self._episodes.counts.pop("agent_errors", 0),
            f"{PREFIX}/session_delete_errors": self._episodes.counts.pop("delete_errors", 0),
            f"{PREFIX}/abandoned_members": self._runner.abandoned,
        }

    # Submitting

    async def _submit_forever(self) -> None:
        while True:
            self._wake.clear()
            while self._may_submit():
                draw = self._settlement.draw()
                if draw is not None:
                    self._submit(draw)
            if self._source.exhausted and not self._running:
                self.buffer.end()
            await self._wake.wait()

    def _may_submit(self) -> bool:
        return (
            not self._pauses
            and not self._source.exhausted
            and self._slots.room
            and self._settlement.admits
            and not any(run.putting for run in self._running.values())
        )

    def _submit(self, draw: Draw) -> None:
        run = RunningGroup(draw, asyncio.get_running_loop().time(), self._version())
        self._running[draw.key] = run
        self._slots.open_group(draw.group_id)
        self._spawn(partial(self._carry, run))

    async def _carry(self, run: RunningGroup) -> None:
        """Take a group from its members to the buffer."""
        try:
            outcomes = await self._run_members(run)
        finally:
            self._slots.close_group(run.draw.group_id)
            self._changed()
        draw, members = run.draw, tuple(outcome.member for outcome in outcomes)
        group = Group(draw.prompt.prompt_id, draw.group_id, draw.epoch, draw.attempt, members)
        self._ledger.record_generated(group)
        self._progress_s = asyncio.get_running_loop().time()
        run.putting = True
        drop = await self.buffer.put(group)
        if drop is not None and drop.reason is DropReason.GENERATION_FAILED:
            logger.warning("%s failed: %s", run, drop.detail)
        self._streaks.follow(group, drop, outcomes)

    async def _run_members(self, run: RunningGroup) -> list[Episode]:
        draw, size = run.draw, self._config.group_size
        name = {"prompt_id": draw.prompt.prompt_id, "epoch": draw.epoch, "group_id": draw.group_id}
        seeds = [
            member_seed(self._run_seed, draw.prompt.prompt_id, epoch=draw.epoch, attempt=draw.attempt, member=index)
            for index in range(size)
        ]
        episodes = [
            self._episodes.run(
                draw.prompt,
                seed=seed,
                sampling=self._sampling,
                metadata={**name, "attempt": draw.attempt, "member": index},
            )
            for index, seed in enumerate(seeds)
        ]
        return await self._runner.run(str(run), episodes, seeds=seeds, on_member_end=self._member_end(draw.group_id))

    def _member_end(self, group_id: int) -> Callable[[], None]:
        def end() -> None:
            self._slots.close_member(group_id)
            self._changed()

        return end

    # What the buffer decides

    def _on_accept(self, group: Group) -> None:
        self._running.pop(group.key, None)
        self._ledger.record_put(group)
        self._changed()

    def _on_drop(self, group: Group, drop: Drop) -> None:
        self._running.pop(group.key, None)
        if self._settlement.drop(group, drop):
            self.buffer.reopen()
        self._changed()

    # Handing out

    async def _drain(self, count: int) -> list[Group]:
        waiting_since = asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout(self._config.no_progress_warn_s) as limit:
                    await self._until_nothing_is_due()
                    return await self.buffer.get_many(count)
            except TimeoutError:
                if self._failure is not None or not limit.expired():
                    raise
                self._report_no_progress(waiting_since)

    async def _until_nothing_is_due(self) -> None:
        """Under `admit` a group at its limit belongs into this batch: wait for it rather than let it become stale."""
        while self._limit is not None and any(self._due(run, self._limit) for run in self._running.values()):
            await self._until_changed()

    def _due(self, run: RunningGroup, limit: int) -> bool:
        version = self._version()
        return version is not None and run.version is not None and run.version + limit <= version

    def _report_no_progress(self, waiting_since_s: float) -> None:
        silent_s = asyncio.get_running_loop().time() - max(self._progress_s, waiting_since_s)
        if silent_s < self._config.no_progress_warn_s:
            return
        message = f"No completed rollout groups for {silent_s:.1f}s: {self._situation()}"
        logger.warning("%s", message)
        limit = self._config.no_progress_timeout_s
        if limit is not None and silent_s >= limit:
            raise StallError(f"{message}; worker.no_progress_timeout_s is {limit}")

    def _situation(self) -> str:
        generating = [run for run in self._running.values() if not run.putting]
        oldest = min(generating, key=lambda run: run.began_s, default=None)
        now = asyncio.get_running_loop().time()
        who = "nothing is in flight" if oldest is None else f"the oldest is {oldest}, {now - oldest.began_s:.1f}s old"
        return (
            f"{who}; {len(generating)} groups with {self._slots.samples} samples in flight, "
            f"{len(self._running) - len(generating)} waiting to be put, {len(self.buffer.groups())} queued"
        )

    # Living and dying

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is ends the worker and is raised at the consumer
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self.buffer.fail(error)
        self._changed()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    def _changed(self) -> None:
        self._wake.set()
        self._change.set()
        self._change.clear()

    async def _until_changed(self) -> None:
        await self._change.wait()
        if self._failure is not None:
            raise self._failure

    def _make_settlement(self, buffer: BufferConfig) -> Settlement:
        config, admission = self._config, None
        if self._limit is not None:
            admission = Admission(max_staleness=self._limit, batch_groups=config.batch_groups, version=self._version)
        return Settlement(
            self._source,
            self._ledger,
            admission=admission,
            failure_policy=config.failure_policy,
            max_tries=config.max_tries,
            unused_handler=buffer.unused_handler,
        )

    def _make_buffer(self, buffer: BufferConfig, make: BufferFactory) -> Buffer:
        """Under `admit` the admission is the bound; a smaller buffer could block the group that a batch waits for."""
        capacity = buffer.capacity_groups(self._config.batch_groups)
        if self._limit is not None:
            capacity = max(capacity, (self._limit + 1) * self._config.batch_groups)
        return make(
            buffer,
            batch_groups=self._config.batch_groups,
            version=self._version,
            on_drop=self._on_drop,
            on_accept=self._on_accept,
            oldest_first=self._limit is not None,
            capacity_groups=capacity,
        )
