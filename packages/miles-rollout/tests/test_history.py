"""Events on disk, the history they prove, and the command that tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_rollout import EventLog, check_history, read_events
from miles_rollout.cli import main
from miles_rollout.errors import HistoryError

NAME = {"prompt_id": "p0", "epoch": 0, "group_id": 0}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    about = {} if kind in {"open", "update"} else NAME
    return {"kind": kind, **about, **fields}


SOUND = [
    event("open", max_staleness=2),
    event("update", version=0, digest="a"),
    event("draw", attempt=0),
    event("submit", attempt=0),
    event("drop", reason="generation_failed", detail="timeout", fate="retry"),
    event("draw", attempt=1),
    event("submit", attempt=1),
    event("put", oldest_version=0),
    event("get", version=2, oldest_version=0),
    event("update", version=2, digest="c"),
    event("train", step=2, version=None, oldest_version=0),
    event("settle", outcome="trained", reason=""),
]


def test_a_sound_run_has_no_faults() -> None:
    history = check_history(SOUND, finished=True)
    assert history.sound
    assert (history.drawn, history.retries, history.max_trained_staleness) == (1, 1, 2)
    assert history.outcomes == {"trained": 1}
    assert history.drop_reasons == {"generation_failed": 1}


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([*SOUND[:-2], event("settle", outcome="trained", reason="")], "settled as trained; no step trained it"),
        ([*SOUND, event("settle", outcome="dropped", reason="stale")], "settled as trained and again as dropped"),
        ([*SOUND, event("train", step=3, version=2, oldest_version=1)], "trained in step 2 and again in step 3"),
        ([*SOUND, event("draw", attempt=2)], "was drawn again; it was trained already"),
        ([e for e in SOUND if e["kind"] != "get"], "had not been handed out"),
        (
            [*SOUND[:-2], event("train", step=2, version=3, oldest_version=0), SOUND[-1]],
            "3 versions old; the limit is 2",
        ),
        ([*SOUND[:-2], event("train", step=2, version=0, oldest_version=1), SOUND[-1]], "has tokens of version 1"),
        ([*SOUND, event("update", version=2, digest="x")], "version 2 has the digests c and x"),
        ([*SOUND, event("update", version=1, digest="b")], "version 1 came after version 2"),
        (SOUND[:-2], "was drawn and never settled"),
        ([event("settle", outcome="dropped", reason="stale")], "was never drawn"),
    ],
)
def test_each_fault_is_found_and_named(events: list[dict[str, Any]], fault: str) -> None:
    faults = check_history(events, finished=True).faults
    assert any(fault in found for found in faults), faults


def test_an_unfinished_run_may_have_open_prompts() -> None:
    history = check_history(SOUND[:-2])
    assert history.sound
    assert [key.prompt_id for key in history.open_prompts] == ["p0"]


def test_events_are_on_disk_at_once_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        log.append("draw", **NAME)
        assert [entry["kind"] for entry in read_events(tmp_path / "run")] == ["draw"]
    with path.open("ab") as file:
        file.write(b'{"kind": "tor')
    assert len(list(read_events(path))) == 1
    with EventLog(path) as log:
        log.append("submit", **NAME)
    assert [entry["kind"] for entry in read_events(path)] == ["draw", "submit"]
    assert all(set(entry) >= {"t", "kind"} for entry in map(json.loads, path.read_text().splitlines()))


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 200_000)
    EventLog(path).close()
    assert path.read_bytes() == b""


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "draw"}\n[1]\n')
    with pytest.raises(HistoryError, match="line 2"):
        list(read_events(path))


def run_why(tmp_path: Path, events: list[dict[str, Any]], *options: str) -> int:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in events))
    with pytest.raises(SystemExit) as exit_:
        main(["why", str(tmp_path), *options])
    return int(exit_.value.code or 0)


def test_why_tells_each_prompt_and_counts_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_why(tmp_path, SOUND) == 0
    told = capsys.readouterr().out
    assert "'p0' of epoch 0: settle: outcome trained (after 9 events)" in told
    assert "1 groups dropped: generation_failed" in told
    assert "1 groups tried again; oldest trained token: 2 versions old" in told


def test_why_tells_the_whole_story_of_one_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_why(tmp_path, SOUND, "--prompt", "p0")
    assert "drop: reason generation_failed, detail timeout, fate retry" in capsys.readouterr().out


def test_why_fails_for_an_unsound_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_why(tmp_path, [*SOUND, event("draw", attempt=2)]) == 1
    assert "FAULT: prompt 'p0' of epoch 0 was drawn again" in capsys.readouterr().out


def test_a_missing_run_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["why", str(tmp_path / "nothing")])
    assert exit_.value.code == 1
    assert capsys.readouterr().err.startswith("miles-rollout: ")


def test_a_misspelt_option_is_refused() -> None:
    command = [sys.executable, "-c", "from miles_rollout.cli import main; main()", "serve-router", "--prot", "1"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode != 0
    assert "--prot" in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stdout + answer.stderr
