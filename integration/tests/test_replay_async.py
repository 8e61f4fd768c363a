"""The asynchronous loop with routing replay: what the trainer replays is what the engine used, also across updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from miles.run_folder import read_jsonl


def test_replayed_routes_are_the_ones_behind_the_log_probabilities(run_tiny: Callable[..., Path]) -> None:
    folder = run_tiny(loop__steps=8, loop__evaluate=False)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row]
    fresh = [row for row in rows if "logprob_diff/max" in row]  # a step may hold no token of the scoring version
    mixed = [row for row in fresh if row["replay/route_mismatch"] > 0]
    largest = max(row["logprob_diff/max"] for row in fresh)
    mean = max(row["logprob_diff/mean"] for row in fresh)
    print(f"|rollout - trainer|, fresh tokens of {len(fresh)} steps: mean at most {mean:.2e}, largest {largest:.2e}")
    assert len(rows) == 8
    assert mixed, "no step had fresh tokens beside routes that its weights would not choose: nothing was shown"
    assert largest <= 1e-3
    assert mean <= 1e-5
