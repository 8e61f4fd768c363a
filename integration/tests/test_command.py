"""The command line with bad input: one clear message, a non-zero exit code, no trace, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.ports import listen


def miles(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from miles.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--tiny", "--loop.stepz", "3"], "did you mean loop.steps?"),
        (["quickstart", "--tiny", "--model.path", "missing"], "model.path missing is no Hugging Face folder"),
        (["train", "missing.toml"], "no recipe at missing.toml"),
        (["report", "missing"], "missing is no run folder"),
        (["quickstart", "--tiny", "--out", "file/run"], "cannot use file/run as run folder: Not a directory"),
        (["quickstart", "--tiny", "--task.prompts_path", "bad.jsonl"], "bad.jsonl, line 2"),
        (["quickstart", "--tiny", "--task.prompts_path", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "input": "1 plus 2"}\n{bad\n')
    before = sorted(path.name for path in tmp_path.iterdir())
    done = miles(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_port_in_use_is_one_message_and_no_process_stays(tmp_path: Path, toy: Path) -> None:
    with listen() as taken:
        port = taken.getsockname()[1]
        done = miles(
            *("quickstart", "--tiny", "--model.path", str(toy), "--out", "run", "--tito.server.port", str(port)),
            cwd=tmp_path,
        )
    assert done.returncode != 0
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert str(tmp_path) not in _command_lines()


def _command_lines() -> str:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append(f"{os.readlink(process / 'cwd')} {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return "\n".join(line for line in found if "miles.roles" in line)


def test_the_configuration_is_shown_with_origins(tmp_path: Path) -> None:
    done = miles("config", "show", "--loop.steps", "3", cwd=tmp_path)
    assert done.returncode == 0
    assert "steps = 3  # command line" in done.stdout
