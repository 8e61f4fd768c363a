"""Advantages from the rewards of a group, one value a rollout (spec 1.3). Values are float64 [S], no unit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from miles_trainer.errors import GroupError

FloatS = NDArray[np.float64]


def group_members(group_ids: Sequence[Hashable]) -> dict[Hashable, NDArray[np.int64]]:
    """Group id → indices of its members, in order of first appearance. The order of the rollouts does not matter."""
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    return {group_id: np.asarray(indices, dtype=np.int64) for group_id, indices in members.items()}


def _checked(rewards: Sequence[float], group_ids: Sequence[Hashable]) -> FloatS:
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) != len(group_ids):
        raise GroupError(f"{len(values)} rewards but {len(group_ids)} group ids: each rollout needs its group id")
    if not np.isfinite(values).all():
        raise GroupError(f"reward {values[~np.isfinite(values)][0]} is not a finite number: fail the rollout instead")
    return values


def has_spread(rewards_G: FloatS) -> bool:
    """Whether a group's rewards differ at all."""
    return bool(rewards_G.max() > rewards_G.min())


def mean_centred_advantages(rewards: Sequence[float], group_ids: Sequence[Hashable]) -> FloatS:
    """R - mean(R of the group); exactly 0 where all rewards of a group are equal or it has one member."""
    values_S = _checked(rewards, group_ids)
    result_S = np.zeros_like(values_S)
    for indices in group_members(group_ids).values():
        group = values_S[indices]
        if has_spread(group):
            result_S[indices] = group - group.mean()
    return result_S


def grpo_advantages(
    rewards: Sequence[float], group_ids: Sequence[Hashable], *, normalize_std: bool = True, epsilon: float = 1e-6
) -> FloatS:
    """Group-relative advantage: (R - mean) / (s + epsilon), s the unbiased standard deviation of the group.

    Without `normalize_std` the centred reward (Dr. GRPO). Exactly 0 for equal rewards and for a group of one.
    Raises GroupError when ids and rewards do not match or a reward is not finite.
    """
    centred_S = mean_centred_advantages(rewards, group_ids)
    if not normalize_std:
        return centred_S
    values_S = np.asarray(rewards, dtype=np.float64)
    for indices in group_members(group_ids).values():
        group = values_S[indices]
        if has_spread(group):
            centred_S[indices] /= group.std(ddof=1) + epsilon
    return centred_S


def leave_one_out_advantages(rewards: Sequence[float], group_ids: Sequence[Hashable]) -> FloatS:
    """RLOO: R minus the mean of the others = G/(G-1)·(R - mean); 0 for a group of one."""
    result_S = mean_centred_advantages(rewards, group_ids)
    for indices in group_members(group_ids).values():
        if len(indices) > 1:
            result_S[indices] *= len(indices) / (len(indices) - 1)
    return result_S


def length_weighted_advantages(
    rewards: Sequence[float], group_ids: Sequence[Hashable], lengths: Sequence[int]
) -> FloatS:
    """OPO: R minus the group's reward weighted by response length."""
    values_S = _checked(rewards, group_ids)
    weights_S = np.asarray(lengths, dtype=np.float64)
    result_S = np.zeros_like(values_S)
    for indices in group_members(group_ids).values():
        group, weights = values_S[indices], weights_S[indices]
        if has_spread(group) and weights.sum() > 0:
            result_S[indices] = group - (group * weights).sum() / weights.sum()
    return result_S
