"""One thread owns model, keys and values. Others send it commands, which it carries out between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from miles_rollout.local.core import EngineCore
from miles_rollout.local.errors import EngineClosedError, EngineTimeoutError

T = TypeVar("T")
_IDLE_CHECK_S = 1.0


class EngineLoop:
    """Runs a core in a thread of its own. `call` is thread-safe and takes no lock that a step holds."""

    def __init__(self, core: EngineCore, *, name: str, command_timeout_s: float) -> None:
        self._core = core
        self._timeout_s = command_timeout_s
        self._wake = threading.Condition()
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Fail what is in flight and end the thread. Safe to call twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(self._timeout_s)

    def call(self, command: Callable[[], T]) -> T:
        """Run `command` on the engine thread and return its result. Raises `EngineTimeoutError` past the deadline."""
        future = self.submit(command)
        try:
            return future.result(self._timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise EngineTimeoutError(f"the engine thread did not answer within {self._timeout_s} s") from None

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Queue `command` for the engine thread. Raises `EngineClosedError` when the thread is ending."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is shut down")
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def _run(self) -> None:
        while self._carry_out():
            if self._core.has_work:
                self._core.step()
        self._core.close()

    def _carry_out(self) -> bool:
        """Run the queued commands, waiting for one when there is nothing else to do. False when the loop must end."""
        with self._wake:
            while not (self._commands or self._closing or self._core.has_work):
                self._wake.wait(_IDLE_CHECK_S)
            commands, self._commands = self._commands, []
            closing = self._closing
        for command, future in commands:
            _complete(command, future)
        return not closing


def _complete(command: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command())
    except Exception as error:  # noqa: BLE001 - the caller gets it; the engine thread lives on
        future.set_exception(error)
