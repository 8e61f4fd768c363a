"""Filters on finished groups. A rejected group is discarded and counted by reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from miles_rollout.groups import Group
from miles_rollout.plugins import load_function

MIN_STD = 1e-8


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """Keep the group, or reject it; a reject without a reason is not counted."""

    keep: bool
    reason: str | None = None


KEEP = FilterVerdict(keep=True)
Filter = Callable[[Group], FilterVerdict | bool]


def nonzero_std(group: Group) -> FilterVerdict:
    """Keep a group whose rewards differ: unbiased standard deviation above 1e-8. A group of one is rejected."""
    rewards = [reward for reward in group.rewards if reward is not None]
    if len(rewards) > 1 and statistics.stdev(rewards) > MIN_STD:
        return KEEP
    first = rewards[0] if rewards else math.nan
    return FilterVerdict(keep=False, reason=f"zero_std_{first:.1f}")


def no_aborted(group: Group) -> FilterVerdict:
    """Keep a group none of whose members was aborted."""
    return FilterVerdict(keep=False, reason="group_has_aborted") if group.aborted else KEEP


FILTERS: dict[str, Filter] = {"nonzero_std": nonzero_std, "no_aborted": no_aborted}


def load_filter(name: str) -> Filter:
    """A built-in filter by name, or any by dotted path (`package.module:function`). Raises PluginError."""
    return FILTERS[name] if name in FILTERS else load_function(name, ("group",), kind="filter")


def judge(group: Group, accept: Filter) -> FilterVerdict:
    """Apply a filter; a bare boolean is a verdict without a reason."""
    verdict = accept(group)
    return verdict if isinstance(verdict, FilterVerdict) else FilterVerdict(keep=bool(verdict))
