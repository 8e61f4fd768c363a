"""One grader process as the pool sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Self

from miles_rollout.config import GraderConfig
from miles_rollout.errors import GraderError
from miles_rollout.graders.framing import pack, read_message


class GraderProcess:
    """A child in a session of its own: killing it kills what it started too."""

    def __init__(self, process: asyncio.subprocess.Process, max_message_bytes: int) -> None:
        self._process = process
        self._max_message_bytes = max_message_bytes

    @classmethod
    async def start(cls, function: str, config: GraderConfig) -> Self:
        """Start a child and wait until it has loaded the grader.

        Raises:
            GraderError: it could not be started, or could not load the function, or not in time.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "miles_rollout.graders.child",
            function,
            str(config.memory_bytes or 0),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        child = cls(process, config.max_message_bytes)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                hello = await child._receive()
        except (TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            await child.kill()
            raise GraderError(f"the process for grader {function!r} did not start: {error!r}") from error
        except asyncio.CancelledError:
            await child.kill()
            raise
        if "error" in hello:
            await child.kill()
            raise GraderError(f"the grader {function!r} was not loaded: {hello['error']}")
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, packed: bytes) -> Mapping[str, Any]:
        """Send a packed request and wait for the reply.

        Raises:
            OSError, asyncio.IncompleteReadError: the process ended.
            ValueError: it wrote something else than a reply.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(packed)
        await self._process.stdin.drain()
        return await self._receive()

    async def kill(self) -> None:
        """End the child and everything it started, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _receive(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        message = await read_message(self._process.stdout, self._max_message_bytes)
        if not isinstance(message, dict):
            raise ValueError(f"a reply is an object, not {type(message).__name__}")
        return message


def pack_request(request: Mapping[str, Any], timeout_s: float, max_bytes: int) -> bytes:
    """A grade request as bytes. Raises GraderError when it is not plain data, or too long."""
    try:
        packed = pack({"request": dict(request), "timeout_s": timeout_s})
    except (TypeError, ValueError) as error:
        raise GraderError(f"prompt {request['prompt_id']!r} cannot be sent to a grader process: {error}") from error
    if len(packed) > max_bytes:
        raise GraderError(
            f"prompt {request['prompt_id']!r} makes a grade request of {len(packed)} bytes; {max_bytes} fit"
        )
    return packed
