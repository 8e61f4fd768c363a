"""The seam between a run and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console

from miles.ui.live import LiveView
from miles.ui.plain import PlainLines
from miles.ui.snapshot import Snapshot


class View(Protocol):
    """Receives what happens in a run. It is open while the run goes."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def phase(self, text: str) -> None:
        """Something happened that is worth a line."""
        ...

    def row(self, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        ...

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """The run can be looked at from now on, as often as the view likes, on the run's event loop."""
        ...


class Silent:
    """Shows nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        return

    def phase(self, text: str) -> None:
        """Ignore."""

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Ignore."""

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """Ignore."""


def choose_view(*, plain: bool, console: Console | None = None) -> View:
    """A live panel in a terminal that can redraw; lines when there is none, or when `plain` asks for them."""
    console = console or Console(highlight=False)
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainLines(console)
    return LiveView(console)
