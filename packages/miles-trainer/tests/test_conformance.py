"""Golden vectors: all pass, an altered value is noticed, and what is not built counts as failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_trainer.conformance.__main__ import check_case, main

LOSS_FILES = (
    "aggregation",
    "context_parallel",
    "corrections_mis",
    "corrections_token",
    "full_step",
    "group_advantages",
    "kl_estimators",
    "logprob_entropy",
    "mismatch_metrics",
    "on_policy_distillation",
    "optimizer",
    "policy_loss",
    "robustness",
    "token_returns",
    "value_loss",
    "whitening",
)


@pytest.mark.parametrize("family", LOSS_FILES)
def test_losses_agree_with_the_golden_vectors(golden: Path, family: str) -> None:
    content = json.loads((golden / "losses" / f"{family}.json").read_text())
    reasons = [reason for case in content["cases"] if (reason := check_case(content["schema"], family, case))]
    assert content["cases"]
    assert not reasons


def test_replay_agrees_with_the_golden_vectors(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(golden / "replay" / "replay.json")]) == 0
    assert capsys.readouterr().out == "65 passed, 0 failed\n"


def test_the_command_prints_totals_and_fails_on_an_altered_value(golden: Path, tmp_path: Path) -> None:
    content = json.loads((golden / "losses" / "aggregation.json").read_text())
    content["cases"][0]["expected"]["token_mean"] += 1e-6
    altered = tmp_path / "aggregation.json"
    altered.write_text(json.dumps(content))
    run = subprocess.run(
        [sys.executable, "-m", "miles_trainer.conformance", str(altered)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert "token_mean" in run.stdout
    assert run.stdout.splitlines()[-1] == "1 passed, 1 failed"


def test_an_altered_route_is_noticed(golden: Path, tmp_path: Path) -> None:
    content = json.loads((golden / "replay" / "replay.json").read_text())
    content["cases"][0]["expect"]["ranks"][0]["streams"]["0"][0] = [1, 7]
    altered = tmp_path / "replay.json"
    altered.write_text(json.dumps(content))
    assert main([str(altered)]) == 1


def test_an_unknown_family_counts_as_failed() -> None:
    case = {"id": "x", "options": {}, "inputs": {}, "expected": {"y": 1}}
    assert check_case("miles-trainer-golden/1", "no_such_family", case) == "not built: family no_such_family"
    assert check_case("another/1", "x", case) == "not built: schema another/1"


def test_an_unreadable_file_counts_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"
