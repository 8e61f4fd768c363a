"""A run on disk: configuration, metrics, events, trajectories, checkpoints, logs and the report."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
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
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def figures(self) -> Path:
        return self.root / "figures"

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


# What the file system may refuse in the middle of a run; other OSErrors have other causes.
_FOLDER_ERRNOS = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM}
    | {errno.EROFS}
)


def folder_error(error: OSError) -> RunFolderError | None:
    """`error` as one of the run folder, when that is what it is."""
    if isinstance(error, RunFolderError) or error.errno not in _FOLDER_ERRNOS or isinstance(error, ConnectionError):
        return None
    where = f" {error.filename}" if error.filename else ""
    return RunFolderError(
        f"the run folder cannot be written:{where} {error.strerror}; the run has stopped: make room, or choose another "
        "--out"
    )


class MetricsLog:
    """Appends one JSON object a step to `metrics.jsonl` and keeps the rows for the live view."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open("a")
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on disk when this returns. Raises `RunFolderError` when the file was removed."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise RunFolderError(f"{self._path} was removed while the run was writing to it; the run has stopped")
        self.rows.append(dict(row))
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. What could not be written was an error before."""
        with suppress(OSError):
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
