"""The embedded runtime: each role is a process of this machine.

A role reads its settings as one JSON line from standard input, announces itself as one JSON line on standard output,
and ends when standard input closes: so roles cannot outlive the driver, however it dies. Standard error goes to
`logs/<name>.log`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.errors import RoleDiedError, RoleError
from miles.rpc import RoleClient
from miles.runtime import RoleSpec

STOP_GRACE_S = 5.0
LOG_TAIL_BYTES = 4000

# One thread a process: two OpenMP threads on two busy cores are a hundred times slower than one.
THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class LocalRole:
    """A role process."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, ready: Mapping[str, Any], token: str, log: Path
    ) -> None:
        self.name = name
        self.ready = ready
        self.pid = process.pid
        self._process = process
        self._token = token
        self._log = log

    def client(self) -> RoleClient:
        """A client of the role's calls."""
        return RoleClient(self.name, str(self.ready["host"]), int(self.ready["call_port"]), self._token)

    def check_alive(self) -> None:
        """Raise `RoleDiedError` when the process has ended."""
        if self._process.returncode is not None:
            raise RoleDiedError(self.name, "role_died", f"ended with {self._process.returncode}: {tail(self._log)}")

    async def stop(self) -> None:
        """Close standard input, wait, then terminate, then kill. A role that is still starting has nothing to end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        gently = [None] if self.ready else []
        for end in (*gently, self._process.terminate, self._process.kill):
            if self._process.returncode is not None:
                return
            if end is not None:
                end()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
            except TimeoutError:
                continue


class LocalRuntime:
    """Starts roles as processes, logs below `run_folder`."""

    def __init__(self, run_folder: Path, *, start_timeout_s: float) -> None:
        self._logs = run_folder / "logs"
        self._start_timeout_s = start_timeout_s
        self._roles: list[LocalRole] = []

    async def start(self, spec: RoleSpec) -> LocalRole:
        """Start a role and wait for its announcement."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{spec.name}.log"
        token = secrets.token_hex(16)
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"miles.roles.{spec.kind}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **THREAD_ENVIRONMENT},
                # its own session: Ctrl-C goes to the driver, which ends the roles in order
                start_new_session=True,
            )
        role = LocalRole(spec.name, process, {}, token, log)
        self._roles.append(role)
        role.ready = await self._announcement(spec, process, token, log)
        return role

    async def aclose(self) -> None:
        """End all roles, the last started first."""
        while self._roles:
            await self._roles.pop().stop()

    async def _announcement(
        self, spec: RoleSpec, process: asyncio.subprocess.Process, token: str, log: Path
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**spec.settings, "name": spec.name, "token": token}).encode() + b"\n")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await process.stdin.drain()
                announcement = await _first_object(process.stdout)
        except TimeoutError:
            raise RoleError(
                spec.name, "start_timeout", f"not ready within {self._start_timeout_s:g} s: {tail(log)}"
            ) from None
        except ConnectionError:
            announcement = None
        if announcement is None:
            await process.wait()
            raise RoleDiedError(spec.name, "role_died", f"ended while starting: {tail(log)}")
        if "error" in announcement:
            raise RoleError(spec.name, announcement["error"]["code"], announcement["error"]["message"])
        return announcement


async def _first_object(lines: asyncio.StreamReader) -> dict[str, Any] | None:
    """The first JSON object among the lines; what a library may print before it is passed over. None at the end."""
    async for line in lines:
        try:
            announcement = json.loads(line)
        except ValueError:
            continue
        if isinstance(announcement, dict):
            return announcement
    return None


def tail(log: Path) -> str:
    """The last lines of a log."""
    try:
        data = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError as error:
        return f"no log ({error})"
    return f"{data}\n(log: {log})" if data else f"no output (log: {log})"
