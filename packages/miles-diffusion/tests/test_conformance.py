from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_diffusion.conformance.__main__ import main

BUILT = ["sde_step", "video5d_sde_step", "cps_step", "ode_dance_step", "sigma_schedule"]


@pytest.mark.parametrize("name", BUILT)
def test_built_files_pass_wholly(golden: Path, capsys: pytest.CaptureFixture[str], name: str):
    assert main([str(golden / f"{name}.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" passed, 0 failed")


def test_what_is_not_built_counts_as_failed_case_by_case(golden: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(golden / "advantages.json")]) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "FAILED advantages.json[0][0]: not built"
    assert output[-1] == "0 passed, 24 failed"


@pytest.mark.parametrize("key", ["log_prob", "noise_std", "log_prob_no_const"])
def test_a_changed_number_is_seen(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str):
    content = json.loads((golden / "sde_step.json").read_text())
    expect = content["cases"][2]["expect"]
    expect[key] = [v * (1 + 1e-8) for v in expect[key]] if isinstance(expect[key], list) else expect[key] * (1 + 1e-8)
    changed = tmp_path / "sde_step.json"
    changed.write_text(json.dumps(content))
    assert main([str(changed)]) == 1
    output = capsys.readouterr().out
    assert f"sde_step.json[2]: {key} is off" in output
    assert output.splitlines()[-1] == "7 passed, 1 failed"


def test_a_density_where_none_is_defined_is_seen(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content = json.loads((golden / "cps_step.json").read_text())
    content["cases"][6]["expect"]["log_prob"] = [0.0, 0.0]
    changed = tmp_path / "cps_step.json"
    changed.write_text(json.dumps(content))
    assert main([str(changed)]) == 1
    assert "cps_step.json[6]: log_prob is None" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "sde_step.json").write_text("[]")
    assert main([str(tmp_path / "sde_step.json"), str(tmp_path / "absent.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 2 failed"
