"""A line a step, and a line for what happens between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from miles.ui.snapshot import Snapshot


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


class PlainLines:
    """Prints the table as it grows. Works in a file, a pipe and a continuous-integration log."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._started = time.monotonic()
        self._header_printed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        return

    def phase(self, text: str) -> None:
        """Say what happened, with the seconds since the run began."""
        elapsed_s = time.monotonic() - self._started
        self._console.print(f"{elapsed_s:6.1f} s  {text}", soft_wrap=True, markup=False)

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Print a step."""
        if not self._header_printed:
            titles = "".join(f"{column.title:>{column.width}}" for column in COLUMNS)
            self._console.print(titles, soft_wrap=True, style="bold")
            self._header_printed = True
        self._console.print("".join(_cell(metrics, column) for column in COLUMNS), soft_wrap=True)

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """Lines tell what happened, not what is: nothing to look at."""


def _cell(metrics: Mapping[str, Any], column: Column) -> str:
    value = metrics.get(column.key)
    return f"{'' if value is None else column.form.format(value):>{column.width}}"
