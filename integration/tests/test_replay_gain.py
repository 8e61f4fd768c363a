"""A bf16 engine against the fp32 trainer: routes differ, and replay brings the log-probabilities closer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from miles.run_folder import read_jsonl


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row]


def test_replay_closes_the_gap_that_other_routes_open(run_tiny: Callable[..., Path], record_property) -> None:  # type: ignore[no-untyped-def]
    sync = {"rollout__buffer__max_staleness": 0, "rollout__worker__staleness_policy": "admit"}
    settings = {"loop__steps": 4, "loop__evaluate": False, "rollout__engine__dtype": "bf16", **sync}
    replayed = steps_of(run_tiny("replayed", **settings))
    chosen = steps_of(run_tiny("chosen", trainer__replay__enabled=False, **settings))
    share = fmean(row["replay/route_mismatch"] for row in replayed)
    with_replay = fmean(row["logprob_diff/mean"] for row in replayed)
    without = fmean(row["logprob_diff/mean"] for row in chosen)
    for name, value in (("routes that differ", share), ("|Δlogp| with", with_replay), ("|Δlogp| without", without)):
        record_property(name, value)
    print(f"routes that differ {share:.2%}; mean |Δlogp| {without:.2e} without replay, {with_replay:.2e} with")
    assert share >= 0.01
    assert with_replay < without
    assert all(row["replay/routes"] > 0 for row in replayed)
