"""A run folder that fails in the middle of a run: one error that names it, and nothing hidden by closing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from miles.errors import RoleDiedError, RunFolderError
from miles.run_folder import MetricsLog, folder_error
from miles.wiring.errors import typed
from miles_rollout import EventLog

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


@needs_full
def test_a_full_disk_is_one_error_of_the_run_folder_and_closing_adds_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    (tmp_path / "events.jsonl").symlink_to(FULL)
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left") as raised:
        metrics.write({"step": 1})
    assert isinstance(typed(raised.value), RunFolderError)
    assert "the run folder cannot be written: No space left" in str(typed(raised.value))
    metrics.close()
    events = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match="No space left"):
        events.append("draw")
    events.close()


def test_a_removed_run_folder_is_noticed_at_the_next_row(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunFolderError, match=r"metrics.jsonl was removed while the run"):
        metrics.write({"step": 2})
    metrics.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOENT, errno.EFBIG])
def test_what_the_file_system_refuses_is_named_with_the_file(number: int) -> None:
    error = OSError(number, os.strerror(number), "runs/x/config.toml")
    assert f"runs/x/config.toml {os.strerror(number)}" in str(typed(error))
    assert isinstance(typed(error), RunFolderError)


def test_other_errors_are_not_the_run_folders() -> None:
    assert folder_error(TimeoutError("late")) is None
    assert folder_error(ConnectionResetError(errno.ECONNRESET, "reset")) is None
    role = RoleDiedError("engine-0", "role_died", "hung up")
    role.__cause__ = BrokenPipeError(errno.EPIPE, "broken")
    assert typed(role) is role
