"""The figures of a report. Each paints one set of axes from the run's record, or says that nothing is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.report.drawing import BLUE, GREEN, GREY, INK, ORANGE, VIOLET
from miles.report.heldout import Comparison, Share, comparisons
from miles.report.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASE_COLOURS = {
    "generate": BLUE,
    "train": GREEN,
    "update": ORANGE,
    "wait": GREY,
    "evaluate": VIOLET,
    "verify": "#c9a227",
    "save": "#b0568f",
}


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """A figure: file name, heading, what it shows, height in inches as a function of the run, and its painter."""

    name: str
    title: str
    note: str
    height_in: Callable[[RunRecord], float]
    paint: Callable[[Axes, RunRecord], bool]


def paint_reward(axes: Axes, run: RunRecord) -> bool:
    """Mean reward and success of each batch, and held-out success with its interval."""
    steps, rewards = run.series("reward/mean")
    if not steps:
        return False
    axes.plot(steps, rewards, color=BLUE, label="mean reward of the batch")
    axes.plot(*run.series("reward/success"), color=VIOLET, label="success of the batch")
    at, success = run.series("heldout/success")
    _, questions = run.series("heldout/questions")
    if at and len(at) == len(questions):
        shares = [Share(round(s * n), int(n)) for s, n in zip(success, questions, strict=True)]
        axes.errorbar(at, success, yerr=_errors(shares), fmt="o", color=GREEN, capsize=3, label="held-out success")
    axes.set(xlabel="training steps", ylim=(-0.03, 1.06))
    _count_in_steps(axes)
    _legend_above(axes)
    return True


def _count_in_steps(axes: Axes) -> None:
    axes.locator_params(axis="x", integer=True)


def _legend_above(axes: Axes) -> None:
    """One row over the axes."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), handlelength=1.4)


def paint_heldout(axes: Axes, run: RunRecord) -> bool:
    """Success before and after for each held-out set and operation."""
    found = comparisons(run.rows)
    if not found:
        return False
    places = list(range(len(found)))
    _points(axes, places, [item.before for item in found], GREY, "before", -0.12)
    after = [(place, item.after) for place, item in zip(places, found, strict=True) if item.after is not None]
    if after:
        _points(axes, [place for place, _ in after], [share for _, share in after], GREEN, "after", 0.12)
    axes.set_yticks(places, [_heldout_label(item) for item in found], color=INK)
    axes.set(xlabel="share answered right, with 95 % interval", xlim=(-0.02, 1.02), ylim=(len(found) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    _legend_above(axes)
    return True


def _heldout_label(item: Comparison) -> str:
    return f"{item.name}  {item.operation or 'all'}"


def _points(axes: Axes, places: list[int], shares: list[Share], colour: str, label: str, shift: float) -> None:
    values = [share.value for share in shares]
    at = [place + shift for place in places]
    axes.errorbar(values, at, xerr=_errors(shares), fmt="o", color=colour, capsize=3, label=label)


def _errors(shares: list[Share]) -> list[list[float]]:
    """Lengths of the interval below and above each value. Wilson's interval contains the value."""
    bounds = [(share.value, *share.interval()) for share in shares]
    return [[max(value - low, 0.0) for value, low, _ in bounds], [max(high - value, 0.0) for value, _, high in bounds]]


def paint_staleness(axes: Axes, run: RunRecord) -> bool:
    """Groups by how far their oldest token was behind."""
    lags = run.staleness()
    if not lags:
        return False
    bars = axes.bar([str(lag) for lag in lags], list(lags.values()), color=BLUE, width=0.4)
    axes.bar_label(bars, color=INK)
    axes.set(xlabel="versions the oldest token was behind the weights that trained on it", ylabel="groups")
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.2 if len(lags) > 1 else 1.5, y=0.15)
    return True


def paint_timeline(axes: Axes, run: RunRecord) -> bool:
    """What each process did and when."""
    phases = run.of_kind("phase")
    if not phases:
        return False
    origin = min(float(phase["begin_s"]) for phase in phases)
    roles = _roles(run)
    for name, colour in PHASE_COLOURS.items():
        label: str | None = name
        for place, role in enumerate(roles):
            spans = [
                (float(p["begin_s"]) - origin, float(p["end_s"]) - float(p["begin_s"]))
                for p in phases
                if p["role"] == role and p["name"] == name
            ]
            if spans:
                axes.broken_barh(spans, (place - 0.36, 0.72), facecolors=colour, label=label)
                label = None
    axes.set_yticks(range(len(roles)), roles, color=INK)
    axes.set(xlabel="seconds", ylim=(len(roles) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    _legend_above(axes)
    return True


def _roles(run: RunRecord) -> list[str]:
    """Processes with phases: the driver, then by name."""
    return sorted({str(phase["role"]) for phase in run.of_kind("phase")}, key=lambda role: (role != "driver", role))


def paint_logprob_difference(axes: Axes, run: RunRecord) -> bool:
    """Mean and largest difference of a step, for tokens of the trainer's version and of older ones."""
    lines = (
        ("logprob_diff/mean", "mean, same version", BLUE, "-"),
        ("logprob_diff/max", "largest, same version", ORANGE, "-"),
        ("stale_logprob_diff/mean", "mean, older versions", GREY, "--"),
    )
    painted = False
    for key, label, colour, style in lines:
        points = [(x, y) for x, y in zip(*run.series(key), strict=True) if y > 0]
        if points:
            axes.plot([x for x, _ in points], [y for _, y in points], style, marker=".", color=colour, label=label)
            painted = True
    if painted:
        axes.set_yscale("log")
        axes.set(xlabel="training steps", ylabel="nats")
        _count_in_steps(axes)
        _legend_above(axes)
    return painted


FIGURES = (
    FigureSpec(
        "reward",
        "Reward",
        "Each batch is sampled by the policy that is being trained; held-out questions are never trained on.",
        lambda run: 3.0,
        paint_reward,
    ),
    FigureSpec(
        "heldout",
        "Held-out questions before and after",
        "Points are shares of right answers, bars Wilson's 95 % intervals.",
        lambda run: 1.2 + 0.42 * len(comparisons(run.rows)),
        paint_heldout,
    ),
    FigureSpec(
        "logprob_difference",
        "Rollout and training agree",
        "|log-probability of the engine - of the trainer| of the trained tokens, in nats. Tokens of older versions "
        "differ because the weights do. A value of exactly 0 is not drawn.",
        lambda run: 3.0,
        paint_logprob_difference,
    ),
    FigureSpec("staleness", "Staleness", "Groups that were trained on.", lambda run: 2.4, paint_staleness),
    FigureSpec(
        "timeline",
        "Timeline",
        "generate: turns of groups that were trained on or evaluated, dropped groups are not shown; wait: the driver "
        "had no full batch; update: from the start of a weight update to its acknowledgement.",
        lambda run: 1.1 + 0.4 * len(_roles(run)),
        paint_timeline,
    ),
)
