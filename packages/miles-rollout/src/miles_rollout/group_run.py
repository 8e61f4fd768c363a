"""Running the members of one group together, with a deadline and without orphans."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from miles_rollout.data.prompts import Draw
from miles_rollout.episodes import Episode
from miles_rollout.groups import Member

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningGroup:
    """A group under way: `version` is the engines' when it was submitted, `began_s` is loop time."""

    draw: Draw
    began_s: float
    version: int | None
    putting: bool = False
    """Finished, and waiting for room in the buffer."""

    def __str__(self) -> str:
        return f"group {self.draw.group_id} (prompt {self.draw.key}, attempt {self.draw.attempt})"


class GroupRunner:
    """Runs members as tasks. The first that fails, or the deadline, ends them all.

    An agent that does not end within the grace period after its cancellation is abandoned: its slot comes free, its
    outcome is thrown away, and `abandoned` counts it.
    """

    def __init__(self, *, timeout_s: float, grace_s: float) -> None:
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._leftover: set[asyncio.Task[Episode]] = set()
        self.abandoned = 0

    async def run(
        self,
        name: str,
        episodes: Sequence[Coroutine[Any, Any, Episode]],
        *,
        seeds: Sequence[int],
        on_member_end: Callable[[], None],
    ) -> list[Episode]:
        """The outcome of each member, in order. Raises what a member raised, after its siblings have ended.

        `name` says in the log whose deadline passed; `on_member_end` is called once a member, however it ends.
        """
        tasks = [asyncio.create_task(episode) for episode in episodes]
        for task in tasks:
            task.add_done_callback(lambda _: on_member_end())
        timed_out = False
        try:
            timed_out = await self._wait(tasks)
            if timed_out:
                self._log_timeout(name, tasks)
        finally:
            await self._end(tasks)
        reason = f"past the group's deadline of {self._timeout_s} s" if timed_out else "ended because a sibling failed"
        return [_outcome(task, seed, reason) for task, seed in zip(tasks, seeds, strict=True)]

    async def _wait(self, tasks: Sequence[asyncio.Task[Episode]]) -> bool:
        """Wait for all, for the first failure, or for the deadline; True at the deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        pending = set(tasks)
        while pending:
            remaining = max(0.0, deadline - loop.time())
            done, pending = await asyncio.wait(pending, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return True
            if any(_failed(task) for task in done):
                return False
        return False

    async def _end(self, tasks: Sequence[asyncio.Task[Episode]]) -> None:
        pending = {task for task in tasks if not task.done()}
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, stubborn = await asyncio.wait(pending, timeout=self._grace_s)
        for task in stubborn:
            self.abandoned += 1
            self._leftover.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Episode]) -> None:
        self._leftover.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("an abandoned member ended with %r", task.exception())

    def _log_timeout(self, name: str, tasks: Sequence[asyncio.Task[Episode]]) -> None:
        unfinished = [index for index, task in enumerate(tasks) if not task.done()]
        logger.warning("%s is past its deadline of %.1f s; members %s had not ended", name, self._timeout_s, unfinished)


def _failed(task: asyncio.Task[Episode]) -> bool:
    return task.cancelled() or task.exception() is not None or task.result().member.aborted


def _outcome(task: asyncio.Task[Episode], seed: int, reason: str) -> Episode:
    """A member's episode; one that was cancelled or abandoned is aborted. Raises what the member raised."""
    if not task.done() or task.cancelled():
        return Episode(Member((), "aborted", None, reason, seed))
    return task.result()
