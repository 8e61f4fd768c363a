"""The grader pool: real processes, killed when they hang, crash or grow."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_rollout import Grade, GradeRequest, GraderPool
from miles_rollout.config import GraderConfig
from miles_rollout.errors import GraderError
from miles_rollout.graders.child import as_grade

GRADERS = """
import asyncio, os, re, sys, time
from miles_rollout import Grade

def by_label(request):
    print("noise on standard output")
    if request.label == "compute":
        return float(9**9**9)
    if request.label == "backtrack":
        return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))
    if request.label == "die":
        os._exit(3)
    if request.label == "grow":
        return float(len(bytearray(8 << 30)))
    if request.label == "raise":
        raise KeyError("x")
    if request.label == "text":
        return "good"
    if request.label == "nan":
        return float("nan")
    if request.label == "pid":
        return float(os.getpid())
    if request.label == "child":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(request.metadata["file"], "w").write(str(child.pid))
        time.sleep(600)
    return {"reward": 0.5, "reason": request.prompt_id}

async def later(request):
    await asyncio.sleep(0.01)
    return Grade(0.25, request.messages[-1]["content"])

def no_argument():
    return 1.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "golden_graders.py").write_text(GRADERS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    yield
    sys.modules.pop("golden_graders", None)


def pool(name: str = "by_label", *, timeout_s: float = 20.0, processes: int = 1, **config: object) -> GraderPool:
    settings = GraderConfig(timeout_s=timeout_s, processes=processes, **config)  # type: ignore[arg-type]
    return GraderPool(settings, f"golden_graders:{name}")


def request(label: object = None, **metadata: object) -> GradeRequest:
    return GradeRequest("p1", label, [{"role": "assistant", "content": "42"}], metadata, "completed")


async def test_a_grade_comes_back_with_its_reason() -> None:
    async with pool() as graders:
        assert await graders.grade(request()) == Grade(0.5, "p1")
    async with pool("later") as graders:
        assert await graders.grade(request()) == Grade(0.25, "42")


@pytest.mark.parametrize("label", ["compute", "backtrack"])
async def test_a_grade_that_never_ends_is_killed_and_worth_nothing(label: str) -> None:
    async with pool(timeout_s=1.0) as graders:
        began = time.monotonic()
        assert await graders.grade(request(label)) == Grade(0.0, "timeout")
        assert time.monotonic() - began < 10
        assert await graders.grade(request()) == Grade(0.5, "p1")
        assert graders.get_metrics() == {
            "reward/graded_count": 1,
            "reward/timeout_count": 1,
            "reward/crashed_count": 0,
            "reward/error_count": 0,
        }


@pytest.mark.parametrize("label", ["die", "grow"])
async def test_a_grader_that_crashes_or_grows_is_replaced(label: str) -> None:
    async with pool(memory_bytes=1 << 30) as graders:
        assert await graders.grade(request(label)) == Grade(0.0, "crashed")
        assert await graders.grade(request()) == Grade(0.5, "p1")


async def test_others_do_not_wait_for_a_hanging_grade() -> None:
    async with pool(timeout_s=3.0, processes=2) as graders:
        await asyncio.gather(graders.grade(request()), graders.grade(request()))
        hanging = asyncio.create_task(graders.grade(request("compute")))
        began = time.monotonic()
        grades = await asyncio.gather(*(graders.grade(request()) for _ in range(100)))
        assert time.monotonic() - began < 2.5
        assert grades == [Grade(0.5, "p1")] * 100
        assert await hanging == Grade(0.0, "timeout")


@pytest.mark.parametrize(
    ("label", "reason"),
    [("raise", "error: KeyError: 'x'"), ("text", "error: TypeError"), ("nan", "error: ValueError: the reward nan")],
)
async def test_a_grader_that_raises_gives_nothing_and_is_counted(label: str, reason: str) -> None:
    async with pool() as graders:
        grade = await graders.grade(request(label))
        assert grade.reward == 0.0
        assert grade.reason.startswith(reason)
        assert graders.get_metrics()["reward/error_count"] == 1


async def test_the_policy_fail_raises_with_the_graders_trace() -> None:
    async with pool(error_policy="fail") as graders:
        with pytest.raises(GraderError, match=r"prompt 'p1'[\s\S]*KeyError"):
            await graders.grade(request("raise"))
        assert await graders.grade(request()) == Grade(0.5, "p1")


async def test_a_killed_grader_takes_its_own_children_along(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with pool(timeout_s=2.0) as graders:
        assert await graders.grade(request("child", file=str(file))) == Grade(0.0, "timeout")
    child = int(file.read_text())
    for _ in range(200):
        if not alive(child):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"process {child} is still there")


ORPHAN = """
import asyncio, os
from miles_rollout import GraderPool, GradeRequest
from miles_rollout.config import GraderConfig

async def main():
    pool = GraderPool(GraderConfig(timeout_s=1.0), "golden_graders:by_label")
    await pool.start()
    grade = await pool.grade(GradeRequest("p", "pid", [], {}, "completed"))
    asyncio.create_task(pool.grade(GradeRequest("p", "compute", [], {}, "completed")))
    await asyncio.sleep(0.3)
    print(int(grade.reward), flush=True)
    os._exit(1)

asyncio.run(main())
"""


async def test_a_grader_does_not_outlive_its_dead_parent() -> None:
    command = [sys.executable, "-c", ORPHAN]
    answer = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    child = int(answer.stdout)
    for _ in range(500):
        if not alive(child):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"process {child} is still there")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_cancelled_grade_does_not_answer_the_next_one() -> None:
    async with pool() as graders:
        waiting = asyncio.create_task(graders.grade(request("compute")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await graders.grade(request()) == Grade(0.5, "p1")


async def test_a_process_killed_between_grades_is_replaced() -> None:
    async with pool() as graders:
        first = await graders.grade(request("pid"))
        os.kill(int(first.reward), signal.SIGKILL)
        grades = [await graders.grade(request()) for _ in range(2)]
        assert grades[1] == Grade(0.5, "p1")


async def test_closing_ends_the_processes_and_further_grades() -> None:
    graders = pool()
    await graders.start()
    pid = int((await graders.grade(request("pid"))).reward)
    await graders.close()
    assert not alive(pid)
    with pytest.raises(GraderError, match="not running"):
        await graders.grade(request())


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("golden_graders:nothing", "cannot be loaded"),
        ("no_such_module:x", "cannot be loaded"),
        ("golden_graders:no_argument", r"wrong signature .*: a grader is called as no_argument\(request\)"),
    ],
)
async def test_a_grader_that_cannot_be_loaded_is_an_error_at_the_start(path: str, fault: str) -> None:
    with pytest.raises(GraderError, match=fault):
        await GraderPool(GraderConfig(), path).start()


async def test_a_request_that_is_not_plain_data_is_refused() -> None:
    async with pool() as graders:
        with pytest.raises(GraderError, match="prompt 'p1' cannot be sent to a grader process"):
            await graders.grade(request(object()))
    async with pool(max_message_bytes=1024) as graders:
        with pytest.raises(GraderError, match="1024 fit"):
            await graders.grade(request("x" * 2000))


def test_what_a_grader_may_return() -> None:
    assert as_grade(1) == Grade(1.0)
    assert as_grade({"reward": 0}) == Grade(0.0)
    assert as_grade(Grade(2.0, "why")) == Grade(2.0, "why")
    with pytest.raises(TypeError):
        as_grade(None)


def test_a_pool_without_a_function_is_an_error() -> None:
    with pytest.raises(GraderError, match=r"set graders\.function"):
        GraderPool(GraderConfig())
