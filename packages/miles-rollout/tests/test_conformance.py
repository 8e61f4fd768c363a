"""The golden vectors through `python -m miles_rollout.conformance`, and that a wrong value fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_rollout.conformance import check_files


def run(*files: Path) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "miles_rollout.conformance", *map(str, files)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return answer.returncode, answer.stdout.splitlines()


def test_buffer_and_numbers_pass_wholly(golden: Path) -> None:
    assert run(golden / "buffer.jsonl", golden / "numeric.jsonl") == (0, ["28 passed, 0 failed"])


def test_what_is_not_built_fails(golden: Path) -> None:
    code, lines = run(golden / "rewards.jsonl", golden / "hostile.jsonl")
    assert code == 1
    assert lines[-1] == "0 passed, 37 failed"
    assert all("not built" in line for line in lines[:-1])


def flipped(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, 99]
    assert isinstance(value, dict)
    first = next(iter(value))
    return {**value, first: flipped(value[first])}


@pytest.mark.parametrize("name", ["buffer", "numeric"])
def test_every_flipped_value_is_noticed(golden: Path, tmp_path: Path, name: str) -> None:
    lines = [json.loads(line) for line in (golden / f"{name}.jsonl").read_text().splitlines()]
    wrong = []
    for vector in lines:
        if "expected" in vector:
            wrong.append({**vector, "expected": flipped(vector["expected"])})
            continue
        for index, operation in enumerate(vector["ops"]):
            changed = {**operation, "expect": flipped(operation["expect"])}
            wrong.append({**vector, "ops": [*vector["ops"][:index], changed, *vector["ops"][index + 1 :]]})
    copy = tmp_path / f"{name}.jsonl"
    copy.write_text("".join(json.dumps(vector) + "\n" for vector in wrong))
    results = check_files([copy])
    assert len(results) == len(wrong)
    assert [result for result in results if not result.fault] == []


def test_unreadable_unknown_and_empty_files_fail(tmp_path: Path) -> None:
    (tmp_path / "numeric.jsonl").write_text("{")
    (tmp_path / "surprise.jsonl").write_text("{}\n")
    (tmp_path / "buffer.jsonl").write_text("")
    code, lines = run(*(tmp_path / f"{name}.jsonl" for name in ("numeric", "surprise", "buffer", "missing")))
    assert code == 1
    assert lines[-1] == "0 passed, 4 failed"
    assert run()[0] == 2
