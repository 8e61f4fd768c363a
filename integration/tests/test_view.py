"""What a run shows: a panel in a terminal, lines elsewhere; and what Ctrl-C does to the process."""

from __future__ import annotations

import asyncio
import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from miles.run_folder import read_jsonl
from miles.stopping import ABORTED, StopRequest
from miles.ui import LiveView, PlainLines, Snapshot, choose_view
from miles.ui.panel import Remark, panel, seconds, sparkline

pty = pytest.importorskip("pty")

DEADLINE_S = 100.0
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
ROW = {
    "step": 3,
    "reward/mean": 0.5,
    "reward/success": 0.375,
    "staleness/mean": 0.5,
    "staleness/max": 1,
    "logprob_diff/mean": 2e-7,
    "logprob_diff/max": 3e-6,
    "rollout/tokens_per_s": 1234.0,
}


def state(**changes: object) -> Snapshot:
    known = {
        "steps": 20,
        "doing": "wait",
        "since_s": 100.0,
        "in_flight": 4,
        "queued": 2,
        "batch_groups": 4,
        "trained": 12,
        "dropped": {"stale": 2, "filtered": 1},
        "versions": {"engine-0": 3, "engine-1": 3},
        "next_version": None,
        "stopping": False,
    }
    return Snapshot(**{**known, **changes})  # type: ignore[arg-type]


def drawn(snapshot: Snapshot | None, rows: list[dict[str, float]]) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(panel(snapshot, rows, Remark("making the toy", 99.0), started_s=90.0, now_s=103.2))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_panel_says_how_far_the_run_is_and_what_it_waits_for() -> None:
    text = drawn(state(), [ROW])
    for part in (
        "3 of 20",
        "waiting for a batch, 3.2 s",
        "0.500, success 38%",
        "4 in flight · 2 queued (a batch is 4) · 12 trained · 3 dropped (filtered 1, stale 2)",
        "mean 0.50 · oldest token 1",
        "mean 2.0e-07 · max 3.0e-06",
        "1,234 a second",
        "engine-0 v3 · engine-1 v3",
        "13.2 s",
    ):
        assert part in text, part


def test_the_panel_shows_an_update_and_a_stop() -> None:
    text = drawn(state(doing="update", next_version=4, stopping=True), [ROW])
    assert "engine-0 v3 → v4" in text
    assert "stopping after this step" in text


def test_the_panel_has_something_to_say_before_the_first_step() -> None:
    assert "making the toy, 4.2 s" in drawn(None, [])
    assert "0 of 20" in drawn(state(), [])


def test_a_curve_has_a_block_for_each_value_and_grows_past_its_scale() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-2.0, 2.0]) == "▁█"


@pytest.mark.parametrize(("duration_s", "text"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (65.0, "1 min 05 s")])
def test_durations_read_well(duration_s: float, text: str) -> None:
    assert seconds(duration_s) == text


def test_lines_are_chosen_without_a_terminal_or_on_request() -> None:
    terminal = Console(force_terminal=True, file=io.StringIO(), _environ={"TERM": "xterm"})
    assert isinstance(choose_view(plain=False, console=terminal), LiveView)
    assert isinstance(choose_view(plain=True, console=terminal), PlainLines)
    assert isinstance(choose_view(plain=False, console=Console(file=io.StringIO())), PlainLines)
    dumb = Console(force_terminal=True, file=io.StringIO(), _environ={"TERM": "dumb"})
    assert isinstance(choose_view(plain=False, console=dumb), PlainLines)


def test_lines_are_one_a_step_and_keep_brackets() -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = PlainLines(console)
    lines.phase("reading [bold]names")
    lines.row(ROW)
    lines.row({"step": 4})
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue().splitlines()
    assert printed[0].endswith("reading [bold]names")
    assert printed[1].split()[:3] == ["step", "version", "reward"]
    assert len(printed) == 4


async def test_work_is_given_up_when_a_stop_is_requested() -> None:
    stop, ended = StopRequest(), asyncio.Event()

    async def endless() -> int:
        try:
            return await asyncio.Future[int]()
        finally:
            ended.set()

    asyncio.get_running_loop().call_soon(stop.request)
    assert await stop.unless_requested(endless()) is None
    assert ended.is_set()


async def test_work_that_is_done_first_gives_its_result_or_its_error() -> None:
    async def result() -> int:
        return 7

    async def error() -> int:
        raise ValueError("no")

    assert await StopRequest().unless_requested(result()) == 7
    with pytest.raises(ValueError, match="no"):
        await StopRequest().unless_requested(error())


class Terminal:
    """`miles` in a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
            os.execve(
                sys.executable, [sys.executable, "-c", "from miles.cli import main; main()", *arguments], environment
            )
        self._deadline = time.monotonic() + DEADLINE_S
        self.shown = b""

    def until(self, pattern: bytes) -> None:
        """Read until `pattern` was shown, escapes left out."""
        while not re.search(pattern, ESCAPES.sub(b"", self.shown)):
            assert self._read(), f"ended before {pattern!r}: {self.text()}"

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def exit_code(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def text(self) -> str:
        return ESCAPES.sub(b"", self.shown).decode(errors="replace")

    def _read(self) -> bool:
        """Whether there was more."""
        os.set_blocking(self._terminal, False)
        while time.monotonic() < self._deadline:
            try:
                data = os.read(self._terminal, 65536)
            except BlockingIOError:
                select.select([self._terminal], [], [], 0.2)
                continue
            except OSError:
                return False  # Linux: the other side of the terminal is closed
            self.shown += data
            return bool(data)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"no end within {DEADLINE_S} s: {self.text()[-3000:]}")


@pytest.fixture
def tiny(toy: Path, tmp_path: Path) -> Callable[[], Terminal]:
    """Start a tiny run that would take long, in a terminal."""

    def start() -> Terminal:
        return Terminal(
            *("quickstart", "--tiny", "--out", "run", "--model.path", str(toy), "--loop.steps", "2000"),
            *("--loop.evaluate", "false"),
            cwd=tmp_path,
        )

    return start


def test_the_first_ctrl_c_finishes_the_step_saves_and_reports(tiny: Callable[[], Terminal], tmp_path: Path) -> None:
    terminal = tiny()
    terminal.until(rb"2 of 2000")
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 0
    shown = terminal.text()
    for part in (
        "miles",
        "in flight",
        "engine-0 v",
        "Ctrl-C again ends at once",
        "stopped as asked, report: run/report",
    ):
        assert part in shown, part
    run = tmp_path / "run"
    assert (run / "checkpoints" / "hf" / "config.json").is_file()
    assert "Ended by the user" in (run / "report.html").read_text()
    events = read_jsonl(run / "events.jsonl")
    steps = [row["step"] for row in read_jsonl(run / "metrics.jsonl") if "reward/mean" in row]
    assert [event["step"] for event in events if event["kind"] == "stopped"] == [steps[-1]]
    assert any(path.name.startswith(f"step-{steps[-1]:06d}") for path in (run / "trajectories").iterdir())
    assert processes_in(tmp_path) == []


def test_the_second_ctrl_c_ends_at_once_and_no_process_stays(tiny: Callable[[], Terminal], tmp_path: Path) -> None:
    terminal = tiny()
    terminal.until(rb"now +(waiting|training|updating)")
    terminal.press_ctrl_c()
    terminal.until(rb"Ctrl-C again ends at once")
    terminal.press_ctrl_c()
    assert terminal.exit_code() == ABORTED
    assert "Traceback" not in terminal.text()
    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes whose working folder is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == folder:
                found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:
            continue
    return found
