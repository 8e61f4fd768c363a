"""One fault for each identity, in the real loop with real processes: the run must stop with that identity's error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.run_folder import read_jsonl
from miles_rollout.errors import LedgerError
from miles_tito import ExpertIdentityError, TokenIdentityError, VersionIdentityError
from miles_weightsync import WeightIdentityError

SABOTAGE = [
    pytest.param("flip_token", 20, TokenIdentityError, "token_identity", id="an id in the session buffer"),
    pytest.param(
        "flip_token_in_transit", 20, TokenIdentityError, "token_identity", id="an id on the way to the trainer"
    ),
    pytest.param("swap_experts", 20, ExpertIdentityError, "expert_identity", id="experts in the session buffer"),
    pytest.param("swap_experts_in_transit", 20, ExpertIdentityError, "expert_identity", id="experts on the way"),
    pytest.param("shift_version", 20, VersionIdentityError, "version_identity", id="a version label off by one"),
    pytest.param("flip_weight_bit", 1, WeightIdentityError, "weight_identity", id="a bit of a weight after receipt"),
    pytest.param("drop_ledger_entry", 1, LedgerError, "ledger", id="a prompt that the trainer does not acknowledge"),
]


@pytest.mark.parametrize(("kind", "after", "error", "code"), SABOTAGE)
def test_the_run_stops_with_the_error_of_the_violated_identity(
    run_tiny: Callable[..., Path], tmp_path: Path, kind: str, after: int, error: type[Exception], code: str
) -> None:
    fault: dict[str, Any] = {"kind": kind, "after": after}
    with pytest.raises(error):
        run_tiny(loop__steps=6, loop__evaluate=False, faults=[fault])
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [event["code"] for event in events if event["kind"] == "failure"] == [code]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "violated" in report


def test_the_same_run_without_a_fault_ends_well(run_tiny: Callable[..., Path]) -> None:
    folder = run_tiny(loop__steps=6, loop__evaluate=False)
    steps = [row for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row]
    assert len(steps) == 6
    assert all(row["identity/records_verified"] > 0 for row in steps)
    assert all(row["identity/expert_rows_verified"] > 0 for row in steps)
    assert all(row["identity/tensors_verified"] > 0 for row in steps)
    assert all(row["identity/versions_checked"] > 0 for row in steps)
    assert 0 < max(row["staleness/max"] for row in steps) <= 1, "rollout ran ahead, and no further than its limit"
    assert overlap(read_jsonl(folder / "events.jsonl")), "generation went on while the trainer stepped"
    assert "violated" not in (folder / "report.html").read_text()


def overlap(events: list[dict[str, Any]]) -> bool:
    """Whether an engine generated during a training step."""
    phases = [event for event in events if event["kind"] == "phase"]
    spans = {name: [(p["begin_s"], p["end_s"]) for p in phases if p["name"] == name] for name in ("train", "generate")}
    return any(b < end and begin < e for begin, end in spans["train"] for b, e in spans["generate"])
