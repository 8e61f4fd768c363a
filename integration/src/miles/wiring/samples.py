"""Groups of the buffer as samples of the trainer.

Here, in the trainer's process, every turn's record is verified, and that each trajectory is in the group, and is the
member, that its session was opened for: a trajectory with perfect records in another member's place would be credited
with that one's reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_rollout.errors import LedgerError
from miles_rollout.groups import GroupRecord, loads_group
from miles_tito import ExpertIdentityError, Trajectory, VersionIdentityError, codec, verify_records
from miles_trainer import RoutedExperts, Sample


@dataclass(frozen=True, slots=True)
class VerifiedBatch:
    """Samples whose records were recomputed, and how much was checked."""

    samples: tuple[Sample, ...]
    records: int
    expert_rows: int
    versions: int
    hard_mismatches: int
    soft_mismatches: int

    def metrics(self) -> dict[str, float]:
        """The counts under their metric names."""
        return {
            "identity/records_verified": self.records,
            "identity/expert_rows_verified": self.expert_rows,
            "identity/versions_checked": self.versions,
            "tito/hard_mismatches": self.hard_mismatches,
            "tito/soft_mismatches": self.soft_mismatches,
        }


def verified_batch(
    groups: Iterable[bytes], *, version: int | None = None, experts_wanted: bool = False
) -> VerifiedBatch:
    """Read group v1 bytes.

    `version` is that of the weights to be trained: no token can be newer. With `experts_wanted` (replay) a trajectory
    must carry its routes. Raises `TokenIdentityError` or `ExpertIdentityError` for a turn that does not match,
    `VersionIdentityError`, and `LedgerError` for a group or trajectory that is not where it belongs.
    """
    samples: list[Sample] = []
    records = expert_rows = versions = hard = soft = 0
    keys: set[tuple[str, int]] = set()
    for data in groups:
        group = loads_group(data)
        if (group.prompt_id, group.epoch) in keys:
            raise LedgerError(f"prompt {group.prompt_id!r} of epoch {group.epoch} is twice in one batch")
        keys.add((group.prompt_id, group.epoch))
        for index, member in enumerate(group.members):
            trajectories = [codec.loads(part) for part in member.trajectories]
            _check_member(group, index, trajectories)
            for trajectory in trajectories:
                verify_records(trajectory)
                _check_versions(trajectory, version)
                if experts_wanted and trajectory.routed_experts is None:
                    raise ExpertIdentityError(
                        f"trajectory {trajectory.trajectory_id} has no routes, and replay is on: nothing says which "
                        "experts the rollout chose"
                    )
                records += len(trajectory.turns)
                expert_rows += len(trajectory.routed_experts.rows) if trajectory.routed_experts else 0
                notes = trajectory.metadata.get("tito", {})
                versions += len(trajectory.turns) if notes.get("version_bounds") == "checked" else 0
                differences = notes.get("mismatches", ())
                hard += sum(bool(difference["hard"]) for difference in differences)
                soft += sum(not difference["hard"] for difference in differences)
                rollout_id = f"{group.group_id}:{group.attempt}:{index}"
                samples.append(sample_of(trajectory, str(group.group_id), rollout_id, member.reward))
    return VerifiedBatch(tuple(samples), records, expert_rows, versions, hard, soft)


def _check_member(group: GroupRecord, index: int, trajectories: Sequence[Trajectory]) -> None:
    """The member has a reward, and its trajectories, each once, are of the session that was opened for it."""
    member = group.members[index]
    where = f"group {group.group_id} (prompt {group.prompt_id!r}), member {index}"
    if member.reward is None:
        raise LedgerError(f"{where}: no reward, status {member.status!r}: such a group is not trained")
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    if len(set(ids)) != len(ids):
        raise LedgerError(f"{where}: a trajectory is there twice: {ids}")
    expected = {
        "prompt_id": group.prompt_id,
        "epoch": group.epoch,
        "group_id": group.group_id,
        "attempt": group.attempt,
        "member": index,
        "seed": member.seed,
        "reward": member.reward,
    }
    for trajectory in trajectories:
        notes = trajectory.metadata.get("tito", {})
        found = {**trajectory.metadata, "seed": notes.get("seed"), "reward": trajectory.reward}
        wrong = [name for name, value in expected.items() if found.get(name) != value]
        if wrong:
            name = wrong[0]
            raise LedgerError(
                f"{where}: trajectory {trajectory.trajectory_id} has {name} {found.get(name)!r}, its group says "
                f"{expected[name]!r}: it does not belong there"
            )


def _check_versions(trajectory: Trajectory, version: int | None) -> None:
    """In a run (`version` is known) no label is newer, and the session server knew the bounds of every label."""
    newest = max((label for _, label in trajectory.weight_version_spans), default=0)
    if version is not None and newest > version:
        raise VersionIdentityError(
            f"trajectory {trajectory.trajectory_id} has tokens of version {newest}, and the weights to be trained are "
            f"version {version}: no engine can have had them"
        )
    if version is not None and trajectory.metadata.get("tito", {}).get("version_bounds") != "checked":
        raise VersionIdentityError(
            f"trajectory {trajectory.trajectory_id}: the session server did not know which versions its engine had; "
            "the driver must tell it before an engine is used"
        )


def sample_of(trajectory: Trajectory, group_id: str, rollout_id: str, reward: float | None) -> Sample:
    """A trajectory as the trainer's arrays; without a reward it counts as 0."""
    return Sample(
        group_id=group_id,
        rollout_id=rollout_id,
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        version_spans=trajectory.weight_version_spans,
        reward=0.0 if reward is None else reward,
        temperature=trajectory.temperature,
        routed_experts=_routes(trajectory),
    )


def _routes(trajectory: Trajectory) -> RoutedExperts | None:
    routes = trajectory.routed_experts
    if routes is None:
        return None
    return RoutedExperts(routes.rows, routes.missing_spans, routes.layers, routes.num_experts, routes.top_k)


def prompt_keys(groups: Sequence[bytes]) -> list[tuple[str, int]]:
    """(prompt id, epoch) of each group, as the trainer acknowledges them."""
    records = [loads_group(data) for data in groups]
    return [(record.prompt_id, record.epoch) for record in records]
