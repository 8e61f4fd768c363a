"""Groups of the buffer as samples of the trainer. Every turn's record is verified here, in the trainer's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_rollout.groups import loads_group
from miles_tito import Trajectory, codec, verify_records
from miles_trainer import RoutedExperts, Sample


@dataclass(frozen=True, slots=True)
class VerifiedBatch:
    """Samples whose records were recomputed, and how much was checked."""

    samples: tuple[Sample, ...]
    records: int
    expert_rows: int
    versions: int
    mismatches: int

    def metrics(self) -> dict[str, float]:
        """The counts under their metric names."""
        return {
            "identity/records_verified": self.records,
            "identity/expert_rows_verified": self.expert_rows,
            "identity/versions_checked": self.versions,
            "tito/mismatches": self.mismatches,
        }


def verified_batch(groups: Iterable[bytes]) -> VerifiedBatch:
    """Read group v1 bytes. Raises `TokenIdentityError` or `ExpertIdentityError` for a turn that does not match."""
    samples: list[Sample] = []
    records = expert_rows = versions = mismatches = 0
    for data in groups:
        group = loads_group(data)
        for index, member in enumerate(group.members):
            for trajectory in map(codec.loads, member.trajectories):
                verify_records(trajectory)
                records += len(trajectory.turns)
                expert_rows += len(trajectory.routed_experts.rows) if trajectory.routed_experts else 0
                notes = trajectory.metadata.get("tito", {})
                versions += len(trajectory.turns) if notes.get("version_bounds") == "checked" else 0
                mismatches += len(notes.get("mismatches", ()))
                rollout_id = f"{group.group_id}:{group.attempt}:{index}"
                samples.append(sample_of(trajectory, str(group.group_id), rollout_id, member.reward))
    return VerifiedBatch(tuple(samples), records, expert_rows, versions, mismatches)


def sample_of(trajectory: Trajectory, group_id: str, rollout_id: str, reward: float | None) -> Sample:
    """A trajectory as the trainer's arrays; a member without a reward counts as 0."""
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
