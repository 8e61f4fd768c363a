"""A panel in the terminal that follows the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from miles.ui.panel import Remark, panel
from miles.ui.snapshot import Snapshot

REFRESH_S = 0.25


class LiveView:
    """Redraws a panel four times a second; what happened scrolls above it.

    It draws on the run's event loop, between the run's own work, so that nothing it reads changes under it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._started_s = time.time()
        self._remark = Remark("starting", self._started_s)
        self._rows: list[Mapping[str, Any]] = []
        self._look: Callable[[], Snapshot] | None = None
        self._drawing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._live.start()
        self._drawing = asyncio.create_task(self._draw_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.gather(self._drawing, return_exceptions=True)
        self._draw()
        self._live.stop()

    def phase(self, text: str) -> None:
        """Print a line above the panel."""
        self._remark = Remark(text, time.time())
        elapsed_s = self._remark.since_s - self._started_s
        self._console.print(f"{elapsed_s:6.1f} s  {text}", soft_wrap=True, markup=False, style="dim")

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Take a step into the curve."""
        self._rows.append(dict(metrics))

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """Look at the run from now on."""
        self._look = look

    async def _draw_forever(self) -> None:
        while True:
            self._draw()
            await asyncio.sleep(REFRESH_S)

    def _draw(self) -> None:
        state = self._look() if self._look is not None else None
        drawn = panel(state, self._rows, self._remark, started_s=self._started_s, now_s=time.time())
        self._live.update(drawn, refresh=True)
