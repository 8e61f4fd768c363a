"""Why a finished group does not reach the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    """The three reasons. What a filter rejects is fixed by its data, so its prompt is never tried again."""

    GENERATION_FAILED = "generation_failed"
    FILTERED = "filtered"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Drop:
    """One decision. `detail` is the filter's reason, the first failure, or the staleness in versions."""

    reason: DropReason
    detail: str = ""

    @property
    def reusable(self) -> bool:
        """Whether the prompt may be tried again."""
        return self.reason is not DropReason.FILTERED

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)
