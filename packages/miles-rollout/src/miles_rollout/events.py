"""The append-only record of a run, `events.jsonl`: one JSON object a line, handed to the system when `append` returns.

Every line has `t` (seconds since 1970) and `kind`. The kinds this package writes:

| kind | when | fields beside the prompt |
|---|---|---|
| `open` | a ledger begins | `max_staleness` |
| `draw` | a prompt is taken from the source | `attempt` |
| `submit` | its members start | `attempt` |
| `generated` | all members ended | `attempt`, `members` (status, oldest_version, n_tokens, seed) |
| `graded` | rewards are known | `attempt`, `rewards`, `reasons` |
| `put` | the buffer took the group | `oldest_version` |
| `drop` | the group was refused or thrown away | `reason`, `detail`, `fate` (`retry` or `final`) |
| `get` | the group was handed out | `version`, `oldest_version` |
| `train` | the group was trained on | `step`, `version`, `oldest_version` |
| `settle` | the prompt has its outcome | `outcome` (`trained` or `dropped`), `reason` |
| `update` | new weights are in the engines | `version`, `digest` |

Kinds about a prompt carry `prompt_id`, `epoch` and `group_id`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from miles_rollout.errors import HistoryError

EVENTS_FILE = "events.jsonl"


class EventSink(Protocol):
    """Where events go."""

    def append(self, kind: str, **fields: Any) -> None: ...


class NoEvents:
    """Keeps nothing."""

    def append(self, kind: str, **fields: Any) -> None:
        return


class EventLog:
    """Appends to a file. A line torn by a crash is cut off when the file is opened again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        _cut_torn_line(path)
        self._file = path.open("ab")

    def append(self, kind: str, **fields: Any) -> None:
        """Write one event and flush it."""
        line = json.dumps({"t": round(time.time(), 6), "kind": kind, **fields}, separators=(",", ":"))
        with self._lock:
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. What could not be written was an error before."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        position = size
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != size:
            file.truncate(position)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, or of the run folder that holds it; a last line without an end is left out.

    Raises:
        HistoryError: there is no file, or a line is not an event (named by its number).
    """
    file = path / EVENTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise HistoryError(f"{file}: there are no events: give the folder of a run, or its {EVENTS_FILE}")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield _event(file, number, line)


def _event(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise HistoryError(f"{file}, line {number}: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        raise HistoryError(f"{file}, line {number}: an event is an object with a kind, not {line[:60]!r}")
    return event
