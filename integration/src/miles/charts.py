"""Line charts as inline SVG: enough for a report that opens anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 30
COLOURS = ("#2f6fde", "#8a5cd1", "#1a7f4b", "#c2571a")


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (x, y)."""

    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def line_chart(lines: Sequence[Line], x_label: str, *, low: float | None = None, high: float | None = None) -> str:
    """An `<svg>` of the series that have points; a sentence when none has."""
    lines = [line for line in lines if line.points]
    if not lines:
        return "<p class=lead>Nothing was recorded.</p>"
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    scale = _Scale(
        min(xs), max(xs), min([*ys] if low is None else [*ys, low]), max([*ys] if high is None else [*ys, high])
    )
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">', *_grid(scale, x_label)]
    for index, line in enumerate(lines):
        parts += _series(line, scale, COLOURS[index % len(COLOURS)], index)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return HEIGHT - BOTTOM - (value - self.y_low) / span * (HEIGHT - TOP - BOTTOM)


def _grid(scale: _Scale, x_label: str) -> list[str]:
    parts = []
    for part in range(5):
        value = scale.y_low + (scale.y_high - scale.y_low) * part / 4
        y = scale.y(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".15"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in (scale.x_low, (scale.x_low + scale.x_high) / 2, scale.x_high):
        parts.append(f'<text x="{scale.x(value):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{value:.3g}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end" dx="-20">{html.escape(x_label)}</text>'
    )
    return parts


def _series(line: Line, scale: _Scale, colour: str, index: int) -> list[str]:
    points = [(scale.x(x), scale.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    if line.dots or len(points) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
    x = LEFT + 8 + index * 200
    parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{colour}"/>')
    parts.append(f'<text x="{x + 15}" y="15">{html.escape(line.label)}</text>')
    return parts
