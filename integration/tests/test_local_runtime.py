"""Role processes: announcements, output, and an end in time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles.errors import RoleDiedError
from miles.runtime import RoleSpec
from miles.runtime.local import STOP_GRACE_S, LocalRuntime, _first_object

TALKATIVE = """
from miles.roles.process import RoleSettings, announce, run_role
import sys
def main(settings):
    print("loading"); print("[1]"); sys.stdout.flush()
    announce({"port": 7})
    print("x" * (1 << 20)); sys.stdout.flush()
    print("all said", file=sys.stderr, flush=True)
run_role(RoleSettings, main)
"""


def test_what_a_role_prints_after_its_announcement_goes_to_the_log_and_never_blocks_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TALKATIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        child.stdin.write(b'{"name": "a", "token": "b"}\n')
        child.stdin.flush()
        assert child.stdout is not None
        assert child.stderr is not None
        assert [child.stdout.readline() for _ in range(3)] == [b"loading\n", b"[1]\n", b'{"port": 7}\n']
        log = child.stderr.read()
        assert child.stdout.read() == b""
        assert child.wait(20) == 0
    assert log.endswith(b"x\nall said\n")
    assert len(log) > 1 << 20


async def test_lines_that_are_no_announcement_are_passed_over() -> None:
    lines = asyncio.StreamReader()
    lines.feed_data(b'loading\n[1]\n\xff\n{"port": 7}\n')
    lines.feed_eof()
    assert await _first_object(lines) == {"port": 7}
    assert await _first_object(lines) is None


async def test_a_role_that_is_still_starting_is_ended_at_once(tmp_path: Path) -> None:
    runtime = LocalRuntime(tmp_path, start_timeout_s=60)
    start = asyncio.create_task(runtime.start(RoleSpec("engine", "engine-0")))
    async with asyncio.timeout(20):
        while not (tmp_path / "logs" / "engine-0.log").exists():
            await asyncio.sleep(0.01)
    began = time.monotonic()
    await runtime.aclose()
    with pytest.raises(RoleDiedError, match="engine-0: ended while starting"):
        await start
    assert time.monotonic() - began < STOP_GRACE_S
