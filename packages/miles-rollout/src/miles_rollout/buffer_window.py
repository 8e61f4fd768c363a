"""What the buffer counts between two training steps, and its metric keys (`spec`: table 2 of the paper, and ours)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_rollout.groups import Group

PREFIX = "rollout/fully_async"
HISTOGRAM_LIMIT = 8


@dataclass(slots=True)
class BufferWindow:
    """Counters since the last training step. Staleness is in versions, waits are in seconds."""

    aborted: int = 0
    stale: int = 0
    put_wait_s: float = 0.0
    get_wait_s: float = 0.0
    filtered: Counter[str] = field(default_factory=Counter)
    handed_staleness: list[int] = field(default_factory=list)
    dropped_staleness: list[int] = field(default_factory=list)
    handed_tokens: list[int] = field(default_factory=list)
    dropped_tokens: list[int] = field(default_factory=list)

    def count_handed(self, group: Group, staleness: int | None) -> None:
        self.handed_tokens.append(group.n_tokens)
        if staleness is not None:
            self.handed_staleness.append(staleness)

    def count_stale(self, group: Group, staleness: int) -> None:
        self.stale += 1
        self.dropped_staleness.append(staleness)
        self.dropped_tokens.append(group.n_tokens)

    def metrics(self, *, queue_size: int, queued_staleness: Sequence[int]) -> dict[str, float]:
        """The step's metrics. An average or maximum over nothing is absent."""
        return {
            f"{PREFIX}/queue_size": queue_size,
            f"{PREFIX}/aborted_groups_filtered": self.aborted,
            f"{PREFIX}/stale_groups_filtered": self.stale,
            f"{PREFIX}/put_wait_seconds": self.put_wait_s,
            f"{PREFIX}/get_wait_seconds": self.get_wait_s,
            **_average(self.handed_staleness, "avg_staleness"),
            **_maximum(self.handed_staleness, "max_staleness"),
            **_average(queued_staleness, "buffer_avg_staleness"),
            **_maximum(queued_staleness, "buffer_max_staleness"),
            **_average(self.dropped_staleness, "dropped_avg_staleness"),
            **_average(self.handed_tokens, "handed_avg_tokens"),
            **_average(self.dropped_tokens, "dropped_avg_tokens"),
            **self._histogram(),
            **{f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.filtered.items()},
        }

    def _histogram(self) -> dict[str, float]:
        counts = Counter(value for value in self.handed_staleness if 0 <= value <= HISTOGRAM_LIMIT)
        return {f"{PREFIX}/staleness_{value}": count for value, count in sorted(counts.items())}


def _average(values: Sequence[int], name: str) -> dict[str, float]:
    return {f"{PREFIX}/{name}": sum(values) / len(values)} if values else {}


def _maximum(values: Sequence[int], name: str) -> dict[str, float]:
    return {f"{PREFIX}/{name}": max(values)} if values else {}
