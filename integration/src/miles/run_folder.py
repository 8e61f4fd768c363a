"""A run on disk: configuration, metrics, events, trajectories, checkpoints, logs and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from miles.errors import RunFolderError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def create(self) -> None:
        """Make the folder. Raises `RunFolderError` when it holds a run already or cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if self.metrics.exists():
                raise RunFolderError(f"{self.root} holds a run already: choose another --out")
            self.trajectories.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            (self.root / ".writable").touch()
            (self.root / ".writable").unlink()
        except RunFolderError:
            raise
        except OSError as error:
            raise RunFolderError(f"cannot use {self.root} as run folder: {error.strerror or error}") from None


class MetricsLog:
    """Appends one JSON object a step to `metrics.jsonl` and keeps the rows for the live view."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a")
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on disk when this returns."""
        self.rows.append(dict(row))
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none when it is absent. A last line cut by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def default_run_root(base: Path) -> Path:
    """`base/<date>-<time>`."""
    return base / time.strftime("%Y%m%d-%H%M%S")
