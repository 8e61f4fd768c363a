"""What the live view sees of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment, taken from what the driver holds anyway.

    `doing` names the driver's phase and `since_s` when it began (seconds since 1970). `queued` counts finished groups
    in the buffer, of which a batch takes `batch_groups`. `dropped` counts groups by reason. `versions` gives each
    engine's weights; `next_version` is set while an update is under way.
    """

    steps: int
    doing: str
    since_s: float
    in_flight: int
    queued: int
    batch_groups: int
    trained: int
    dropped: Mapping[str, int]
    versions: Mapping[str, int]
    next_version: int | None
    stopping: bool
