"""Which published versions a host applies, and which may be deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miles_weightsync.errors import DeltaError

Step = tuple[Literal["seed", "apply"], int]


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version directory: a full checkpoint or a delta on `base_version`; it exists once it is committed."""

    version: int
    kind: Literal["full", "delta"]
    base_version: int | None = None
    committed: bool = True


def plan_pull(applied: int, target: int, versions: Sequence[PublishedVersion]) -> list[Step]:
    """The steps from `applied` to `target`: seed the newest full version on the way, then apply deltas in order.

    Raises DeltaError: `lineage` when the target is behind or a delta is missing, `not_available` without the target.
    """
    if target < applied:
        raise DeltaError("lineage", f"version {target} is behind the applied version {applied}")
    if target == applied:
        return []
    known = {entry.version: entry for entry in versions if entry.committed}
    if target not in known:
        raise DeltaError("not_available", f"version {target} is not published")
    fulls = [v for v, entry in known.items() if entry.kind == "full" and applied < v <= target]
    steps: list[Step] = [("seed", max(fulls))] if fulls else []
    return steps + _deltas(known, max(fulls) if fulls else applied, target)


def _deltas(known: dict[int, PublishedVersion], start: int, target: int) -> list[Step]:
    path: list[Step] = []
    version = target
    while version > start:
        entry = known.get(version)
        if entry is None or entry.base_version is None or entry.base_version >= version:
            raise DeltaError(
                "lineage", f"no chain of deltas leads from version {start} to {target}: {version} is missing"
            )
        path.append(("apply", version))
        version = entry.base_version
    if version != start:
        raise DeltaError("lineage", f"the deltas up to {target} build on version {version}, not on {start}")
    return path[::-1]


def deletable_versions(acknowledged: Sequence[int], versions: Sequence[PublishedVersion]) -> list[int]:
    """Versions nobody needs: every live host is at or beyond them, and a newer full version is committed."""
    newest_full = max((e.version for e in versions if e.kind == "full" and e.committed), default=-1)
    reached = min(acknowledged, default=-1)
    return sorted(e.version for e in versions if e.version <= reached and e.version < newest_full)
