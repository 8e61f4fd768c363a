"""Figures by matplotlib: PNG files with a white ground, and SVG for the page in the page's own colours.

Nothing of matplotlib's global state is used: figures are made directly, under a style of their own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#1d2430", "#667085", "#d8dde6"
PAGE_COLOURS = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"}
"""The greys of a figure become the page's, which are lighter on a dark ground."""

BLUE, VIOLET, GREEN, ORANGE, GREY = "#3b7be0", "#8f63d8", "#239a61", "#cf6a2b", "#8a94a6"
"""Readable on white and on the page's dark ground."""

WIDTH_IN = 7.5
PNG_DPI = 150
STYLE: Any = {  # matplotlib types the keys as one long list of literals
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "miles",
    "svg.fonttype": "path",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure in both forms."""

    svg: str
    png: bytes


def draw(paint: Callable[[Axes], bool], *, height_in: float, label: str) -> Drawn | None:
    """A figure that `paint` fills; None when `paint` found nothing to draw. `label` says what it shows."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        if not paint(figure.subplots()):
            return None
        return Drawn(_svg(figure, label), _png(figure))


def save(drawn: Drawn, path: Path) -> None:
    """Write the PNG."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(drawn.png)


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=PNG_DPI, facecolor="white")
    return data.getvalue()


def _svg(figure: Figure, label: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return inline(text.getvalue(), label)


def inline(svg: str, label: str) -> str:
    """An SVG file as an element of a page: no prologue, ids of its own, the page's greys, a label for readers."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", label.lower())
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
    for colour, variable in PAGE_COLOURS.items():
        body = body.replace(colour, variable)
    return body.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
