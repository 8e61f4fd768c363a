"""The golden vectors, and that their check can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_weightsync.conformance import check_case, check_file, main

FAMILIES = {
    "buckets": 51,
    "delta": 134,
    "frame": 46,
    "gather": 48,
    "manifest": 40,
    "p2p_plan": 26,
    "state": 46,
    "versions": 37,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_golden_case_passes(golden: Path, family: str) -> None:
    assert check_file(golden / f"{family}.json") == (FAMILIES[family], [])


def test_no_golden_file_is_forgotten(golden: Path) -> None:
    assert {path.stem for path in golden.glob("*.json")} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_expectation_is_seen(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    document = json.loads((golden / f"{family}.json").read_text())
    case = next(case for case in document["cases"] if "expect" in case)
    case["expect"] = {"another": "answer"}
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document))
    assert main([str(changed)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert case["id"] in lines[0]
    assert lines[-1] == f"{FAMILIES[family] - 1} passed, 1 failed"


def test_an_error_where_a_value_is_expected_fails() -> None:
    case = {"id": "x", "op": "digest", "params": {"format": "md5"}, "input": "00", "expect": "00"}
    assert "got error format" in str(check_case("manifest", case))


def test_a_value_where_an_error_is_expected_fails() -> None:
    case = {"id": "x", "op": "digest", "params": {"format": "adler32"}, "input": "", "expect_error": "format"}
    assert "expected error format" in str(check_case("manifest", case))


def test_what_is_not_built_counts_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    case = {"id": "x", "op": "telepathy", "input": [], "expect": []}
    file.write_text(json.dumps({"schema": "miles-weightsync-golden/1", "family": "delta", "cases": [case]}))
    assert main([str(file)]) == 1
    assert "not built: delta/telepathy" in capsys.readouterr().out


def test_a_file_of_another_schema_counts_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"schema": "other/1"}))
    assert main([str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"


def test_all_files_pass_together(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path) for path in sorted(golden.glob("*.json"))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "428 passed, 0 failed"
