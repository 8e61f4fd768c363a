"""Load units: tensors that must reach an engine in one load call, declared by the ends of their names.

A rule is a set of suffixes; those under one prefix are one unit, and a missing one is an error. A companion attaches
extra tensors (scales) to the weight they belong to. Units that share a member are one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_weightsync.errors import UnitError, shown

Rule = Sequence[str]


@dataclass(frozen=True, slots=True)
class Companion:
    """Names that end in one of `attach` join the tensor that ends in `owner` under the same prefix."""

    owner: str
    attach: tuple[str, ...]


WEIGHT_COMPANIONS = (
    Companion("weight", ("weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale")),
    Companion("weight_packed", ("weight_scale", "weight_shape")),
)
"""A quantised weight and all its scales."""


def form_units(
    names: Sequence[str], rules: Sequence[Rule] = (), companions: Sequence[Companion] = ()
) -> list[list[int]]:
    """Group names into units: lists of ascending indices, ordered by first member.

    Raises UnitError: `unit` when a name matches more than one (rule, suffix), `unit_incomplete` when a member of a
    rule's unit or the owner of a companion is missing.
    """
    groups = _Groups(len(names))
    places = {name: index for index, name in enumerate(names)}
    _join_rules(names, rules, groups)
    for index, name in enumerate(names):
        owner = _owner_of(name, places, companions)
        if owner is not None:
            groups.join(index, owner)
    return groups.lists()


def unit_prefix(name: str, suffix: str) -> str | None:
    """What stands before `suffix` when it matches whole segments at the end of `name`, else None."""
    if name == suffix:
        return ""
    return name[: -len(suffix)] if name.endswith("." + suffix) else None


def _join_rules(names: Sequence[str], rules: Sequence[Rule], groups: _Groups) -> None:
    found: dict[tuple[int, str], dict[str, int]] = {}
    for index, name in enumerate(names):
        matches = [
            (number, prefix, suffix)
            for number, rule in enumerate(rules)
            for suffix in rule
            if (prefix := unit_prefix(name, suffix)) is not None
        ]
        if len(matches) > 1:
            raise UnitError("unit", f"{name} belongs to more than one load unit: make the unit rules disjoint", [name])
        for number, prefix, suffix in matches:
            found.setdefault((number, prefix), {})[suffix] = index
    for (number, prefix), members in found.items():
        _require_complete(prefix, rules[number], members)
        indices = list(members.values())
        for index in indices[1:]:
            groups.join(indices[0], index)


def _require_complete(prefix: str, rule: Rule, members: dict[str, int]) -> None:
    absent = [prefix + suffix for suffix in rule if suffix not in members]
    if absent:
        raise UnitError("unit_incomplete", f"a load unit lacks {shown(absent)}: export the whole unit", absent)


def _owner_of(name: str, places: dict[str, int], companions: Sequence[Companion]) -> int | None:
    wanted = [
        prefix + companion.owner
        for companion in companions
        for suffix in companion.attach
        if (prefix := unit_prefix(name, suffix)) is not None
    ]
    owners = [places[owner] for owner in wanted if owner in places]
    if wanted and not owners:
        raise UnitError("unit_incomplete", f"{name} belongs to {' or '.join(wanted)}, which is not there", [name])
    return owners[0] if owners else None


class _Groups:
    """Union-find over indices; the smallest index of a group is its root."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def root(self, index: int) -> int:
        while self._parent[index] != index:
            self._parent[index] = self._parent[self._parent[index]]
            index = self._parent[index]
        return index

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self.root(a), self.root(b)))
        self._parent[high] = low

    def lists(self) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for index in range(len(self._parent)):
            groups.setdefault(self.root(index), []).append(index)
        return list(groups.values())
