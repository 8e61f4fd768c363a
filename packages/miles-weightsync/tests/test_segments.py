"""Shared segments: removed whatever happens, and never read beyond what is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_weightsync import TransportError
from miles_weightsync.segments import Segment, read_segment, sweep_abandoned


def test_bytes_written_are_bytes_read(tmp_path: Path) -> None:
    segment = Segment(4096, tmp_path)
    segment.view[:5] = b"hello"
    assert read_segment(segment.name, 5, tmp_path) == b"hello"
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_segment_is_not_swept(tmp_path: Path) -> None:
    segment = Segment(16, tmp_path)
    assert sweep_abandoned(tmp_path) == []
    assert read_segment(segment.name, 16, tmp_path) == bytes(16)
    segment.close()


def test_the_segment_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom miles_weightsync.segments import Segment\n"
        "segment = Segment(16, Path(sys.argv[1]))\nprint(segment.name, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert sweep_abandoned(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert sweep_abandoned(tmp_path) == [name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../etc/passwd", "/etc/passwd", "miles-ws-", "miles-ws-" + "g" * 32, ""])
def test_names_of_other_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="no segment name"):
        read_segment(name, 1, tmp_path)


def test_links_and_short_files_are_refused(tmp_path: Path) -> None:
    link, short = (f"miles-ws-{digit * 32}" for digit in "12")
    (tmp_path / "target").write_bytes(b"secret")
    os.symlink(tmp_path / "target", tmp_path / link)
    (tmp_path / short).write_bytes(b"abc")
    with pytest.raises(TransportError, match="cannot be opened"):
        read_segment(link, 6, tmp_path)
    with pytest.raises(TransportError, match="not a file of this user with 4 bytes"):
        read_segment(short, 4, tmp_path)


def test_a_folder_without_room_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="lower bucket_bytes"):
        Segment(1 << 60, tmp_path)
    assert list(tmp_path.iterdir()) == []
