"""What a run folder holds, read once for all parts of the report. Missing pieces are empty, not errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.run_folder import RunFolder, read_jsonl

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Rows of `metrics.jsonl`, events, the configuration's text and the environment of a run."""

    folder: RunFolder
    rows: Sequence[Row]
    events: Sequence[Row]
    config: str
    environment: Mapping[str, Any]

    @property
    def steps(self) -> list[Row]:
        """The rows of training steps."""
        return [row for row in self.rows if "reward/mean" in row]

    @property
    def failure(self) -> Row | None:
        """The event of the error that ended the run."""
        return next((event for event in reversed(self.events) if event.get("kind") == "failure"), None)

    @property
    def stopped(self) -> bool:
        """Whether the user ended the run before its last step."""
        return any(event.get("kind") == "stopped" for event in self.events)

    def of_kind(self, kind: str) -> list[Row]:
        """The events of a kind."""
        return [event for event in self.events if event.get("kind") == kind]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """(steps, values) of a metric, where it is known."""
        found = [(float(row["step"]), float(row[key])) for row in self.rows if row.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def staleness(self) -> dict[int, int]:
        """Groups trained on by how many versions their oldest token was behind."""
        trained = [event for event in self.of_kind("train") if event.get("version") is not None]
        lags = Counter(
            int(e["version"]) - int(e["oldest_version"]) for e in trained if e.get("oldest_version") is not None
        )
        return dict(sorted(lags.items()))


def read_record(folder: RunFolder) -> RunRecord:
    """Read a run folder."""
    environment = json.loads(folder.environment.read_text()) if folder.environment.exists() else {}
    config = folder.config.read_text() if folder.config.exists() else ""
    return RunRecord(folder, read_jsonl(folder.metrics), read_jsonl(folder.events), config, environment)
