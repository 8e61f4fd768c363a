"""A batch as the trainer reads it: nothing may be in another's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.loop import shuffled_rewards
from miles.wiring.samples import verified_batch
from miles.wiring.trajectories import TrajectoryBytes
from miles_rollout import Group, dumps_group
from miles_rollout.errors import LedgerError
from miles_rollout.groups import Member
from miles_tito import ExpertIdentityError, Trajectory, VersionIdentityError, codec, record_digest

GOLDEN = Path(__file__).parents[2] / "contracts" / "trajectory" / "v1" / "trajectory.safetensors"
NEWEST = 4  # version in the golden trajectory


def trajectory_of(group_id: int, member: int, **changes: Any) -> Trajectory:
    golden = codec.loads(GOLDEN.read_bytes())
    place: Mapping[str, Any] = {
        "prompt_id": f"p{group_id}",
        "epoch": 0,
        "group_id": group_id,
        "attempt": 0,
        "member": member,
        "tito": {"seed": 100 * group_id + member, "version_bounds": "checked"},
    }
    fields = {"trajectory_id": f"t{group_id}.{member}", "metadata": place, "reward": float(member), **changes}
    return replace(golden, **fields)


def member_of(group_id: int, member: int, **changes: Any) -> Member:
    trajectory = trajectory_of(group_id, member, **changes)
    return Member((trajectory,), "completed", float(member), "graded", 100 * group_id + member)


def group_of(group_id: int, **changes: Any) -> Group:
    members = tuple(member_of(group_id, member) for member in range(3))
    return replace(Group(f"p{group_id}", group_id, 0, 0, members), **changes)


def read(*groups: Group, **options: Any) -> int:
    return len(verified_batch([dumps_group(group, TrajectoryBytes()) for group in groups], **options).samples)


def test_groups_as_they_were_made_are_read() -> None:
    assert read(group_of(0), group_of(1), version=NEWEST) == 6
    assert read(*shuffled_rewards([group_of(0), group_of(1)], seed=1)) == 6


def test_members_in_another_order_are_refused() -> None:
    group = group_of(0)
    with pytest.raises(LedgerError, match=r"member 0: trajectory t0.2 has member 2, its group says 0"):
        read(replace(group, members=group.members[::-1]))


def test_a_trajectory_in_two_members_is_refused() -> None:
    first, second, third = group_of(0).members
    with pytest.raises(LedgerError, match=r"trajectory t0\.0 has member 0, its group says 1"):
        read(group_of(0, members=(first, replace(second, trajectories=first.trajectories), third)))


def test_a_trajectory_twice_in_a_member_is_refused() -> None:
    first, *others = group_of(0).members
    with pytest.raises(LedgerError, match="twice"):
        read(group_of(0, members=(replace(first, trajectories=first.trajectories * 2), *others)))


def test_a_trajectory_of_another_prompt_is_refused() -> None:
    first, *others = group_of(0).members
    foreign = replace(first, trajectories=(trajectory_of(1, 0),))
    with pytest.raises(LedgerError, match=r"trajectory t1\.0 has prompt_id 'p1', its group says 'p0'"):
        read(group_of(0, members=(foreign, *others)))


@pytest.mark.parametrize("change", [{"attempt": 1}, {"epoch": 1}, {"group_id": 7}, {"prompt_id": "other"}])
def test_a_group_under_another_name_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LedgerError, match=f"has {next(iter(change))}"):
        read(replace(group_of(0), **change))


def test_a_reward_that_is_not_the_graders_is_refused() -> None:
    first, *others = group_of(0).members
    with pytest.raises(LedgerError, match=r"has reward 0.0, its group says 0.5"):
        read(group_of(0, members=(replace(first, reward=0.5), *others)))
    with pytest.raises(LedgerError, match="no reward, status 'aborted'"):
        read(group_of(0, members=(replace(first, reward=None, status="aborted"), *others)))


def test_another_seed_is_refused() -> None:
    first, *others = group_of(0).members
    with pytest.raises(LedgerError, match="has seed 0, its group says 5"):
        read(group_of(0, members=(replace(first, seed=5), *others)))


def test_a_group_twice_in_a_batch_is_refused() -> None:
    with pytest.raises(LedgerError, match="prompt 'p0' of epoch 0 is twice in one batch"):
        read(group_of(0), group_of(0))


def test_a_token_newer_than_the_weights_is_refused() -> None:
    with pytest.raises(VersionIdentityError, match=f"tokens of version {NEWEST}"):
        read(group_of(0), version=NEWEST - 1)


def test_with_replay_a_trajectory_without_routes_is_refused() -> None:
    bare = trajectory_of(0, 0)
    turns = tuple(
        replace(turn, expert_digest=None, expert_version_spans=(), trimmed_expert_rows=None, record_digest=digest)
        for turn, digest in zip(bare.turns, _digests_without_routes(bare), strict=True)
    )
    first, *others = group_of(0).members
    member = replace(first, trajectories=(replace(bare, turns=turns, routed_experts=None),))
    group = group_of(0, members=(member, *others))
    assert read(group) == 3
    with pytest.raises(ExpertIdentityError, match="has no routes, and replay is on"):
        read(group, experts_wanted=True)


def _digests_without_routes(trajectory: Trajectory) -> list[str]:
    return [
        record_digest(
            trajectory.token_ids[: turn.prompt_length],
            [*trajectory.token_ids[turn.prompt_length : turn.end], *turn.trimmed_ids],
            [*trajectory.logprobs[turn.prompt_length : turn.end], *turn.trimmed_logprobs],
            turn.version_spans,
        )
        for turn in trajectory.turns
    ]


def test_versions_that_nobody_could_bound_are_refused_in_a_run() -> None:
    unbounded = {**trajectory_of(0, 0).metadata, "tito": {"seed": 0, "version_bounds": "unknown"}}
    first = replace(member_of(0, 0), trajectories=(trajectory_of(0, 0, metadata=unbounded),))
    group = group_of(0, members=(first, *group_of(0).members[1:]))
    assert read(group) == 3
    with pytest.raises(VersionIdentityError, match=r"t0\.0: the session server did not know"):
        read(group, version=NEWEST)
