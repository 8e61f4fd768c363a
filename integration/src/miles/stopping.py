"""Ctrl-C: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

ABORTED = 130
"""Exit code of a run that was ended at once: 128 + SIGINT."""

ABORT_GRACE_S = 5.0
"""Time the roles get to end after the second Ctrl-C; they end by themselves when this process does."""

Result = TypeVar("Result")


class StopRequest:
    """Whether the user asked the run to end."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.aborted = False

    @property
    def requested(self) -> bool:
        """Whether the run should end after this step."""
        return self._asked.is_set()

    def request(self) -> None:
        """Ask for an end after this step."""
        self._asked.set()

    async def unless_requested(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of `work`; None when a stop was requested before it was there, and `work` is cancelled then."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for future in (task, asked):
                future.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)


@contextmanager
def interruptible(stop: StopRequest, say: Callable[[str], None]) -> Iterator[None]:
    """Take Ctrl-C inside the block: the first sets `stop`, the second cancels the current task and bounds its end."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if not stop.requested:
            stop.request()
            say("stopping: this step is finished, then checkpoint and report are written; Ctrl-C again ends at once")
        elif not stop.aborted:
            stop.aborted = True
            say("ending at once")
            # a thread that cannot be cancelled (a download, a conversion) must not hold the end up
            loop.call_later(ABORT_GRACE_S, os._exit, ABORTED)
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
