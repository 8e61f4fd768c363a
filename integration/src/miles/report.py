"""`report.html` of a run: one self-contained page from what the run folder holds."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.charts import Line, line_chart
from miles.run_folder import RunFolder, read_jsonl

STYLE = (Path(__file__).parent / "report.css").read_text()

IDENTITIES = (
    ("Tokens", "identity/records_verified", "turn records whose digest the trainer recomputed"),
    ("Experts", "identity/expert_rows_verified", "expert rows covered by those digests"),
    ("Weights", "identity/tensors_verified", "tensors digested as stored by the engines"),
    ("Versions", "identity/versions_checked", "turns whose version labels lay within their bounds"),
    ("Ledger", "identity/ledger_closed", "steps after which every drawn prompt was accounted for"),
)


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` from `config.toml`, `metrics.jsonl` and `events.jsonl`; returns its path."""
    rows = read_jsonl(folder.metrics)
    steps = [row for row in rows if "reward/mean" in row]
    events = read_jsonl(folder.events)
    failure = next((event for event in reversed(events) if event.get("kind") == "failure"), None)
    config = folder.config.read_text() if folder.config.exists() else ""
    body = [
        f"<h1>{html.escape(folder.root.name)}</h1>",
        f"<p class=lead>{_outcome(steps, failure)}</p>",
        _cards(rows, steps),
        "<h2>Reward</h2>",
        _reward_chart(rows, steps),
        "<h2>Identity checks</h2>",
        _identity_table(rows, failure),
        "<h2>Rollout and training agree</h2>",
        _agreement_chart(steps),
        "<h2>Groups</h2>",
        _groups_table(steps, events),
        "<h2>Steps</h2>",
        _steps_table(steps),
        "<h2>Configuration</h2>",
        f"<pre>{html.escape(config)}</pre>",
    ]
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(folder.root.name)}</title><style>{STYLE}</style>"
    folder.report.write_text(page + "\n".join(body) + "\n")
    return folder.report


def _outcome(steps: Sequence[Mapping[str, Any]], failure: Mapping[str, Any] | None) -> str:
    if failure is not None:
        code, message = (html.escape(str(failure[key])) for key in ("code", "message"))
        return f"<span class=bad>Stopped: {code}</span> {message}"
    return f"{len(steps)} training steps, each followed by a verified weight update."


def _cards(rows: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> str:
    held_out = [row["heldout/success"] for row in rows if "heldout/success" in row]
    cards = []
    if held_out:
        cards.append(("held-out success before", f"{held_out[0]:.1%}"))
    if len(held_out) > 1:
        cards.append(("held-out success after", f"{held_out[-1]:.1%}"))
    if steps:
        cards.append(("tokens trained", f"{sum(row.get('trained_tokens', 0) for row in steps):,.0f}"))
        cards.append(("seconds", f"{steps[-1].get('time/elapsed_s', 0):.0f}"))
    return (
        "<div class=cards>" + "".join(f"<div class=card><b>{v}</b><span>{k}</span></div>" for k, v in cards) + "</div>"
    )


def _reward_chart(rows: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> str:
    held_out = [(float(row["step"]), row["heldout/success"]) for row in rows if "heldout/success" in row]
    lines = [
        Line("mean reward of the batch", [(float(row["step"]), row["reward/mean"]) for row in steps]),
        Line("success of the batch", [(float(row["step"]), row["reward/success"]) for row in steps]),
        Line("held-out success", held_out, dots=True),
    ]
    return line_chart(lines, "step", low=0.0, high=1.0)


def _agreement_chart(steps: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        Line(label, [(float(row["step"]), row[key]) for row in steps if row.get(key) is not None])
        for label, key in (("mean |Δ log-prob|", "logprob_diff/mean"), ("max |Δ log-prob|", "logprob_diff/max"))
    ]
    note = "Difference between the engine's log-probabilities and the trainer's, same version, nats."
    return line_chart(lines, "step", low=0.0) + f"<p class=lead>{note}</p>"


def _identity_table(rows: Sequence[Mapping[str, Any]], failure: Mapping[str, Any] | None) -> str:
    code = str(failure["code"]) if failure else ""
    cells = []
    for name, key, meaning in IDENTITIES:
        count = sum(row.get(key, 0) or 0 for row in rows)
        broken = code.startswith(name.lower().rstrip("s"))
        verdict = (
            "<span class=bad>violated</span>" if broken else "<span class=good>held</span>" if count else "not checked"
        )
        cells.append(f"<tr><td>{name}<td>{verdict}<td class=number>{count:,.0f}<td>{meaning}")
    return "<table><tr><th>Identity<th>Result<th class=number>Checks<th>What was counted" + "".join(cells) + "</table>"


def _groups_table(steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    drawn = sum(event.get("kind") == "draw" for event in events)
    trained = sum(event.get("kind") == "train" for event in events)
    rows = [("drawn", drawn), ("trained", trained)]
    reasons = sorted({str(event.get("reason")) for event in events if event.get("kind") == "drop"})
    for reason in reasons:
        rows.append(
            (f"dropped: {reason}", sum(e.get("kind") == "drop" and str(e.get("reason")) == reason for e in events))
        )
    rows.append(("without spread of reward", int(sum(row.get("groups/no_spread", 0) for row in steps))))
    body = "".join(f"<tr><td>{html.escape(name)}<td class=number>{count}" for name, count in rows)
    staleness = [row["staleness/max"] for row in steps if row.get("staleness/max") is not None]
    note = f"<p class=lead>Oldest token trained: {max(staleness):.0f} versions behind.</p>" if staleness else ""
    return f"<table>{body}</table>{note}"


def _steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("step", "step", "{:.0f}"),
        ("version", "weights/version", "{:.0f}"),
        ("mean reward", "reward/mean", "{:.3f}"),
        ("loss", "train/loss", "{:.5f}"),
        ("grad norm", "train/grad_norm", "{:.3f}"),
        ("staleness", "staleness/mean", "{:.2f}"),
        ("wait s", "time/wait_batch_s", "{:.2f}"),
        ("train s", "time/train_s", "{:.2f}"),
        ("update s", "time/update_s", "{:.2f}"),
    )
    head = "".join(f"<th class=number>{name}" for name, _, _ in columns)
    body = "".join(
        "<tr>" + "".join(f"<td class=number>{_cell(row.get(key), form)}" for _, key, form in columns) for row in steps
    )
    return f"<table><tr>{head}{body}</table>"


def _cell(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
