"""What a run shows while it goes: a line a step, and a line for what it waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console


class View(Protocol):
    """Receives what happens in a run."""

    def phase(self, text: str) -> None: ...

    def row(self, metrics: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table."""

    title: str
    key: str
    form: str
    width: int


COLUMNS = (
    Column("step", "step", "{:.0f}", 5),
    Column("version", "weights/version", "{:.0f}", 8),
    Column("reward", "reward/mean", "{:.3f}", 8),
    Column("success", "reward/success", "{:.0%}", 8),
    Column("loss", "train/loss", "{:+.4f}", 9),
    Column("stale", "staleness/mean", "{:.2f}", 6),
    Column("|Δlogp|", "logprob_diff/mean", "{:.1e}", 9),
    Column("dropped", "groups/dropped", "{:.0f}", 8),
    Column("tok/s", "rollout/tokens_per_s", "{:.0f}", 7),
    Column("wait s", "time/wait_batch_s", "{:.2f}", 7),
    Column("train s", "time/train_s", "{:.2f}", 8),
    Column("update s", "time/update_s", "{:.2f}", 9),
)


class LiveTable:
    """Prints the table to a console as it grows; plain lines where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._started = time.monotonic()
        self._header_printed = False

    def phase(self, text: str) -> None:
        """Say what the run does now, with the seconds since it began."""
        elapsed_s = time.monotonic() - self._started
        self._console.print(f"[dim]{elapsed_s:6.1f} s[/dim]  {text}", soft_wrap=True)

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Print a step."""
        if not self._header_printed:
            titles = "".join(f"{column.title:>{column.width}}" for column in COLUMNS)
            self._console.print(f"[bold]{titles}[/bold]", soft_wrap=True)
            self._header_printed = True
        self._console.print("".join(_cell(metrics, column) for column in COLUMNS), soft_wrap=True)


class Silent:
    """Shows nothing."""

    def phase(self, text: str) -> None:
        """Ignore."""

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Ignore."""


def _cell(metrics: Mapping[str, Any], column: Column) -> str:
    value = metrics.get(column.key)
    return f"{'' if value is None else column.form.format(value):>{column.width}}"
