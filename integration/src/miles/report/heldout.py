"""Held-out success before and after training, with 95 % intervals, in all and for each operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from miles.report.record import Row

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Share:
    """`right` of `questions`."""

    right: int
    questions: int

    @property
    def value(self) -> float:
        """As a fraction."""
        return self.right / self.questions if self.questions else 0.0

    def interval(self) -> tuple[float, float]:
        """Wilson's score interval for a proportion, 95 % (E. B. Wilson, JASA 22, 1927)."""
        n = self.questions
        if n == 0:
            return 0.0, 1.0
        centre = (self.value + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
        half = Z_95 / (1 + Z_95**2 / n) * sqrt(self.value * (1 - self.value) / n + Z_95**2 / (4 * n * n))
        return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set of held-out questions, or the questions of one operation in it. `after` is None after one evaluation."""

    name: str
    operation: str
    before: Share
    after: Share | None

    @property
    def label(self) -> str:
        """Set and operation."""
        return f"{self.name}: {self.operation}" if self.operation else self.name


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """First and last evaluation of each set (`heldout/<set>/…`) and operation (`heldout/<set>/<operation>/…`).

    A run without named sets has one, `held out` (`heldout/…`).
    """
    evaluations = [row for row in rows if any(key.startswith("heldout/") for key in row)]
    keys = dict.fromkeys(key.removesuffix("/success") for row in evaluations for key in row if key.endswith("/success"))
    names = [key for key in keys if key.startswith("heldout/")] or [key for key in keys if key == "heldout"]
    return [_comparison(key, evaluations) for key in names]


def _comparison(key: str, evaluations: Sequence[Row]) -> Comparison:
    shares = [
        Share(round(row[f"{key}/success"] * row[f"{key}/questions"]), int(row[f"{key}/questions"]))
        for row in evaluations
        if f"{key}/success" in row and f"{key}/questions" in row
    ]
    name, _, operation = key.removeprefix("heldout").strip("/").partition("/")
    return Comparison(name or "held out", operation, shares[0], shares[-1] if len(shares) > 1 else None)
