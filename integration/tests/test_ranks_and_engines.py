"""Two trainer ranks and two engines in the real loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from miles.run_folder import read_jsonl
from miles_rollout import loads_group
from miles_tito import codec


def test_two_ranks_train_and_two_engines_get_every_version(run_tiny: Callable[..., Path]) -> None:
    folder = run_tiny(
        loop__steps=4, loop__evaluate=False, runtime__trainer_ranks=2, runtime__engines=2, weightsync__transport="gloo"
    )
    steps = [row for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row]
    assert [row["weights/version"] for row in steps] == [1, 2, 3, 4]
    boot = next(row for row in read_jsonl(folder / "metrics.jsonl") if "identity/tensors_verified" in row)
    assert all(row["identity/tensors_verified"] == boot["identity/tensors_verified"] for row in steps)
    assert served_by(folder) == {"engine-0:1", "engine-1:1"}


def served_by(folder: Path) -> set[str]:
    groups = [loads_group(path.read_bytes()) for path in folder.glob("trajectories/*.bin")]
    trajectories = [codec.loads(part) for group in groups for member in group.members for part in member.trajectories]
    return {turn.engine_id for trajectory in trajectories for turn in trajectory.turns}
