from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_quant.conformance.__main__ import main

BUILT = ["cast_e4m3", "fp8_block_weight", "fp8_block_act", "fp8_block_full"]


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("name", BUILT)
def test_built_families_pass_wholly(golden: Path, capsys: pytest.CaptureFixture[str], name: str):
    assert main([str(golden / f"{name}.json")]) == 0
    assert last_line(capsys).endswith(" passed, 0 failed")


@pytest.mark.parametrize(("name", "line"), [("cast_e8m0", "1 passed, 3 failed"), ("repack", "2 passed, 1 failed")])
def test_what_is_not_built_counts_as_failed(golden: Path, capsys: pytest.CaptureFixture[str], name: str, line: str):
    assert main([str(golden / f"{name}.json")]) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == line
    assert output.count(": not built") == int(line.split()[2])


def test_a_changed_byte_is_seen(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content = json.loads((golden / "fp8_block_weight.json").read_text())
    codes = content["cases"][5]["expect"]["codes"]
    codes["hex"] = f"{int(codes['hex'][:2], 16) ^ 1:02x}" + codes["hex"][2:]
    changed = tmp_path / "fp8_block_weight.json"
    changed.write_text(json.dumps(content))
    assert main([str(changed)]) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "171 passed, 1 failed"
    assert "codes: element 0 is" in output


def test_a_changed_digest_is_seen(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content = json.loads((golden / "fp8_block_full.json").read_text())
    content["cases"][0]["expect_digest"]["scale"]["sha256"] = "0" * 64
    changed = tmp_path / "fp8_block_full.json"
    changed.write_text(json.dumps(content))
    assert main([str(changed)]) == 1
    assert last_line(capsys) == "9 passed, 1 failed"


def test_an_input_that_should_have_been_refused_is_seen(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = json.loads((golden / "rejects.json").read_text())
    content["cases"] = content["cases"][:1]
    content["cases"][0]["input"]["hex"] = "0000803f" * 32
    changed = tmp_path / "rejects.json"
    changed.write_text(json.dumps(content))
    assert main([str(changed)]) == 1
    assert "no NonFiniteError was raised" in capsys.readouterr().out


def test_a_file_that_is_not_golden_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.json").write_text('{"schema": "other"}')
    assert main([str(tmp_path / "x.json"), str(tmp_path / "absent.json")]) == 1
    assert last_line(capsys) == "0 passed, 2 failed"
