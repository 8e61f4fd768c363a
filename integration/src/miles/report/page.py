"""`report.html` of a run, from what its folder holds."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles.report.drawing import draw, save
from miles.report.figures import FIGURES, FigureSpec
from miles.report.heldout import Share, comparisons
from miles.report.record import RunRecord, read_record
from miles.report.tokens import trajectories_html
from miles.run_folder import RunFolder

STYLE = (Path(__file__).parent / "style.css").read_text()

IDENTITIES = (
    ("Tokens", "identity/records_verified", "turn records whose digest the trainer recomputed"),
    ("Experts", "identity/expert_rows_verified", "expert rows covered by those digests"),
    ("Weights", "identity/tensors_verified", "tensors digested as stored by the engines"),
    ("Versions", "identity/versions_checked", "turns whose version labels lay within their bounds"),
    ("Ledger", "identity/ledger_closed", "steps after which every drawn prompt was accounted for"),
)
STEP_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("version", "weights/version", "{:.0f}"),
    ("mean reward", "reward/mean", "{:.3f}"),
    ("success", "reward/success", "{:.1%}"),
    ("loss", "train/loss", "{:.5f}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("staleness", "staleness/mean", "{:.2f}"),
    ("wait s", "time/wait_batch_s", "{:.2f}"),
    ("train s", "time/train_s", "{:.2f}"),
    ("update s", "time/update_s", "{:.2f}"),
)
NOTHING = "<p class=lead>Nothing was recorded.</p>"
ABSOLUTE_PATH = re.compile(r"(?<![\w./:…])/(?:[^\s\"'/()]+/)+([^\s\"'/()]+)")


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` and the PNGs in `figures/`; returns the page's path. What is missing is said, not guessed."""
    run = read_record(folder)
    name = html.escape(folder.root.resolve().name)
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><style>{STYLE}</style>"
    folder.report.write_text("\n".join([head, f"<h1>{name}</h1>", *_sections(run)]) + "\n")
    return folder.report


def _sections(run: RunRecord) -> Iterator[str]:
    yield f"<p class=lead>{_outcome(run)}</p>"
    yield _cards(run)
    for spec in FIGURES:
        yield f"<h2>{spec.title}</h2>"
        yield _figure(run, spec)
        if spec.name == "heldout":
            yield _heldout_table(run)
        if spec.name == "logprob_difference":
            yield "<h2>Identity checks</h2>" + _identity_table(run)
        if spec.name == "staleness":
            yield "<h2>Groups</h2>" + _groups_table(run)
    yield "<h2>Trajectories</h2>" + trajectories_html(run)
    yield "<h2>Steps</h2>" + _table([name for name, _, _ in STEP_COLUMNS], _step_rows(run), first_is_text=False)
    yield "<h2>Configuration</h2><p class=lead>A remark names where a value was set; the others are defaults.</p>"
    yield f"<details><summary>config.toml</summary><pre>{html.escape(shortened(run.config))}</pre></details>"
    yield "<h2>Environment</h2>" + _environment_table(run)


def shortened(text: str) -> str:
    """`text` with absolute paths cut to their last part: a report may be shown to others."""
    return ABSOLUTE_PATH.sub(r"…/\1", text)


def _outcome(run: RunRecord) -> str:
    if run.failure is not None:
        code, message = (html.escape(shortened(str(run.failure.get(key)))) for key in ("code", "message"))
        return f"<span class=bad>Stopped: {code}</span> {message}"
    done = f"{len(run.steps)} training steps, each followed by a verified weight update."
    return f"{done} Ended by the user before the last step." if run.stopped else done


def _cards(run: RunRecord) -> str:
    cards = []
    overall = [item for item in comparisons(run.rows) if not item.operation][:1]
    for item in overall:
        cards.append((f"held-out success before ({item.before.questions})", f"{item.before.value:.1%}"))
        if item.after is not None:
            cards.append((f"held-out success after ({item.after.questions})", f"{item.after.value:.1%}"))
    if run.steps:
        cards.append(("tokens trained", f"{sum(row.get('trained_tokens', 0) for row in run.steps):,.0f}"))
        cards.append(("steps", f"{len(run.steps)}"))
        cards.append(("seconds", f"{run.steps[-1].get('time/elapsed_s', 0):.0f}"))
    body = "".join(f"<div class=card><b>{value}</b><span>{name}</span></div>" for name, value in cards)
    return f"<div class=cards>{body}</div>"


def _figure(run: RunRecord, spec: FigureSpec) -> str:
    drawn = draw(lambda axes: spec.paint(axes, run), height_in=spec.height_in(run), label=spec.title)
    if drawn is None:
        return NOTHING
    save(drawn, run.folder.figures / f"{spec.name}.png")
    return f"<figure>{drawn.svg}<figcaption>{html.escape(spec.note)}</figcaption></figure>"


def _heldout_table(run: RunRecord) -> str:
    found = comparisons(run.rows)
    if not found:
        return ""
    rows = [
        (item.name, item.operation or "all", _share(item.before), "" if item.after is None else _share(item.after))
        for item in found
    ]
    return _table(["set", "questions", "before", "after"], rows, numbers=False)


def _share(share: Share) -> str:
    low, high = share.interval()
    return f"{share.right} of {share.questions} = {share.value:.1%} ({low:.1%} to {high:.1%})"


def _identity_table(run: RunRecord) -> str:
    code = str(run.failure.get("code")) if run.failure else ""
    body = ""
    for name, key, meaning in IDENTITIES:
        count = sum(row.get(key, 0) or 0 for row in run.rows)
        verdict = "<span class=good>held</span>" if count else "not checked"
        if code.startswith(name.lower().rstrip("s")):
            verdict = "<span class=bad>violated</span>"
        body += f"<tr><td>{name}<td>{verdict}<td class=number>{count:,.0f}<td>{meaning}"
    return f"<table><tr><th>Identity<th>Result<th class=number>Checks<th>What was counted{body}</table>"


def _groups_table(run: RunRecord) -> str:
    drops = run.of_kind("drop")
    reasons = sorted({str(event.get("reason")) for event in drops})
    rows = [("drawn", len(run.of_kind("draw"))), ("trained", len(run.of_kind("train")))]
    rows += [(f"dropped: {reason}", sum(str(drop.get("reason")) == reason for drop in drops)) for reason in reasons]
    rows.append(("without spread of reward", int(sum(row.get("groups/no_spread", 0) for row in run.steps))))
    return _table(["groups", "count"], [(name, str(count)) for name, count in rows])


def _step_rows(run: RunRecord) -> list[tuple[str, ...]]:
    return [
        tuple("" if row.get(key) is None else form.format(row[key]) for _, key, form in STEP_COLUMNS)
        for row in run.steps
    ]


def _environment_table(run: RunRecord) -> str:
    if not run.environment:
        return NOTHING
    packages = run.environment.get("packages", {})
    rows: list[tuple[str, ...]] = [
        (name.replace("_", " "), str(value)) for name, value in run.environment.items() if name != "packages"
    ]
    rows.append(("packages", ", ".join(f"{name} {version}" for name, version in packages.items())))
    return _table(["", ""], rows, numbers=False)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], *, first_is_text: bool = True, numbers: bool = True
) -> str:
    def kind(column: int) -> str:
        return " class=number" if numbers and (column or not first_is_text) else ""

    lines = ["".join(f"<th{kind(at)}>{html.escape(name)}" for at, name in enumerate(head))]
    lines += ["".join(f"<td{kind(at)}>{html.escape(str(cell))}" for at, cell in enumerate(row)) for row in rows]
    return "<table>" + "".join(f"<tr>{line}" for line in lines) + "</table>"
