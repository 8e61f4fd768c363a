"""A bounded pool of grader processes. A grade that is late or kills its process is worth 0, and harms nobody else."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from miles_rollout.config import GraderConfig
from miles_rollout.errors import GraderError
from miles_rollout.graders.process import GraderProcess, pack_request
from miles_rollout.protocols import Grade, GradeRequest

logger = logging.getLogger(__name__)

TIMEOUT = Grade(0.0, "timeout")
CRASHED = Grade(0.0, "crashed")


class GraderPool:
    """Runs `function` (package.module:name) in `config.processes` children, one grade at a time in each.

    The function takes a `GradeRequest` and returns a `Grade`, a number, or a dict with `reward`; it may be async.
    A grade past its deadline gets reward 0 and reason `timeout`; one whose process died, 0 and `crashed`; one that
    raised, 0 and `error: …` (or GraderError under `error_policy` "fail"). The process is replaced.
    """

    def __init__(self, config: GraderConfig, function: str | None = None) -> None:
        path = function or config.function
        if path is None:
            raise GraderError("there is no grader: set graders.function to package.module:function")
        self._config = config
        self._function = path
        self._slots: asyncio.Queue[GraderProcess | None] = asyncio.Queue()
        self._all: set[GraderProcess] = set()
        self._open = False
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start one child, so that a grader that cannot be loaded is an error now. The others start when needed."""
        self._open = True
        first = await self._spawn()
        for child in (first, *[None] * (self._config.processes - 1)):
            self._slots.put_nowait(child)

    async def close(self) -> None:
        """Kill all children. Grades under way end as `crashed`."""
        self._open = False
        for child in list(self._all):
            await self._retire(child)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def grade(self, request: GradeRequest) -> Grade:
        """One grade. Waiting for a free process does not count towards its deadline.

        Raises:
            GraderError: the pool is closed, the request is not plain data, no process starts, or (policy "fail") the
                grader raised.
        """
        if not self._open:
            raise GraderError("the grader pool is not running: enter it with `async with`, or call `start`")
        packed = pack_request(asdict(request), self._config.timeout_s, self._config.max_message_bytes)
        slot: GraderProcess | None = await self._slots.get()
        kept: GraderProcess | None = None
        try:
            child = slot if slot is not None and slot.alive else await self._spawn()
            try:
                reply = await self._ask(child, packed)
                kept = child if isinstance(reply, Mapping) else None
            finally:
                if kept is None:
                    await asyncio.shield(self._retire(child))
        finally:
            self._slots.put_nowait(kept)
        return self._judge(reply, request)

    def get_metrics(self) -> dict[str, float]:
        """Counters since the last call: `reward/graded_count`, `reward/timeout_count`, …"""
        counts, self.counts = self.counts, Counter()
        names = ("graded", "timeout", "crashed", "error")
        return {f"reward/{name}_count": counts[name] for name in names}

    async def _spawn(self) -> GraderProcess:
        if not self._open:
            raise GraderError("the grader pool is closed")
        child = await GraderProcess.start(self._function, self._config)
        self._all.add(child)
        return child

    async def _retire(self, child: GraderProcess) -> None:
        self._all.discard(child)
        await child.kill()

    async def _ask(self, child: GraderProcess, packed: bytes) -> Mapping[str, Any] | Grade:
        """The child's reply, or the grade that stands for none; then the child is of no further use."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await child.ask(packed)
        except TimeoutError:
            return TIMEOUT
        except (OSError, asyncio.IncompleteReadError, ValueError):
            return CRASHED

    def _judge(self, reply: Mapping[str, Any] | Grade, request: GradeRequest) -> Grade:
        if isinstance(reply, Grade):
            self.counts[reply.reason] += 1
            logger.warning("the grade of prompt %r: %s", request.prompt_id, reply.reason)
            return reply
        if "error" not in reply:
            self.counts["graded"] += 1
            return Grade(float(reply["reward"]), str(reply["reason"]))
        self.counts["error"] += 1
        if self._config.error_policy == "fail":
            raise GraderError(f"the grader raised on prompt {request.prompt_id!r}:\n{reply.get('traceback', '')}")
        logger.warning("the grader raised on prompt %r: %s", request.prompt_id, reply["error"])
        return Grade(0.0, f"error: {reply['error']}")
