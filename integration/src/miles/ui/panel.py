"""The panel of the live view, as a function of what is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles.ui.snapshot import Snapshot

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_STEPS = 40
WORDS = {
    "start": "starting",
    "verify": "comparing the engines' weights with the trainer's",
    "wait": "waiting for a batch",
    "train": "training",
    "update": "updating the engines' weights",
    "evaluate": "asking the held-out questions",
    "save": "saving the checkpoint",
    "end": "ending the processes",
}


@dataclass(frozen=True, slots=True)
class Remark:
    """The last thing the run said, and when (seconds since 1970)."""

    text: str
    since_s: float


def panel(
    state: Snapshot | None, rows: Sequence[Mapping[str, Any]], remark: Remark, *, started_s: float, now_s: float
) -> RenderableType:
    """What to draw: what the run does, and a line for each subject once it can be looked at (`state` is not None)."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    if state is None:
        lines.add_row("now", f"{remark.text}, {seconds(now_s - remark.since_s)}")
    else:
        for name, content in _subjects(state, rows, now_s):
            lines.add_row(name, content)
    hint = "stopping after this step; Ctrl-C ends at once" if state and state.stopping else "Ctrl-C: finish, save, stop"
    return Panel(
        lines, title="miles", title_align="left", subtitle=f"{hint} · {seconds(now_s - started_s)}", border_style="dim"
    )


def _subjects(state: Snapshot, rows: Sequence[Mapping[str, Any]], now_s: float) -> Sequence[tuple[str, RenderableType]]:
    last = rows[-1] if rows else {}
    return (
        ("step", _progress(int(last.get("step", 0)), state.steps)),
        ("now", f"{WORDS.get(state.doing, state.doing)}, {seconds(now_s - state.since_s)}"),
        ("reward", _curve([row["reward/mean"] for row in rows if "reward/mean" in row], last)),
        ("groups", _groups(state)),
        ("staleness", _numbers(last, ("mean {:.2f}", "staleness/mean"), ("oldest token {:.0f}", "staleness/max"))),
        ("|Δ log-prob|", _numbers(last, ("mean {:.1e}", "logprob_diff/mean"), ("max {:.1e}", "logprob_diff/max"))),
        ("tokens", _numbers(last, ("{:,.0f} a second", "rollout/tokens_per_s"))),
        ("weights", _weights(state)),
    )


def _progress(step: int, steps: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(f"{step} of {steps}", ProgressBar(total=steps, completed=step, width=30))
    return grid


def _curve(rewards: Sequence[float], last: Mapping[str, Any]) -> Text:
    if not rewards:
        return Text("–")
    text = Text.assemble((sparkline(rewards[-CURVE_STEPS:]), "cyan"), f" {rewards[-1]:.3f}")
    if "reward/success" in last:
        text.append(f", success {last['reward/success']:.0%}")
    return text


def _groups(state: Snapshot) -> str:
    dropped = sum(state.dropped.values())
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(state.dropped.items()) if count)
    return (
        f"{state.in_flight} in flight · {state.queued} queued (a batch is {state.batch_groups}) · "
        f"{state.trained} trained · {dropped} dropped" + (f" ({reasons})" if reasons else "")
    )


def _numbers(row: Mapping[str, Any], *items: tuple[str, str]) -> str:
    return " · ".join(form.format(row[key]) for form, key in items if row.get(key) is not None) or "–"


def _weights(state: Snapshot) -> str:
    arrow = "" if state.next_version is None else f" → v{state.next_version}"
    return " · ".join(f"{engine} v{version}{arrow}" for engine, version in state.versions.items()) or "–"


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One block a value; the scale is at least `low` to `high`."""
    low, high = min([low, *values]), max([high, *values])
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / ((high - low) or 1.0) * top)] for value in values)


def seconds(duration_s: float) -> str:
    """A duration as people say it: `3.2 s`, `1 min 05 s`."""
    if duration_s < 60:
        return f"{max(duration_s, 0.0):.1f} s"
    return f"{int(duration_s // 60)} min {int(duration_s % 60):02d} s"
