"""Trajectories token by token: turns, which tokens were trained, how likely each was, and which weights sampled it."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from pathlib import Path

from miles.report.record import RunRecord
from miles_rollout.errors import RolloutError
from miles_rollout.groups import loads_group
from miles_tito import TitoError, Tokenizer, Trajectory, codec
from miles_tito.trajectory import NOT_SAMPLED, span_values

LIKELY = ((0.9, "p0"), (0.5, "p1"), (0.1, "p2"), (0.0, "p3"))
"""Least probability of each colour."""

VERSION_COLOURS = 4
OPEN_PROMPT_TOKENS = 48
"""The end of a prompt that is shown without a click: the question itself."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A trajectory of the report and where it comes from."""

    file: str
    member: int
    reward: float | None
    reason: str
    trajectory: Trajectory


def choose(folder: Path) -> list[Shown]:
    """Up to three: the worst of the first saved step, the best of the last, and one that several versions sampled, or
    the worst of the last. Unreadable files are passed over.
    """
    steps: dict[str, list[Shown]] = {}
    for file in sorted(folder.glob("step-*-group-*.bin")):
        steps.setdefault(file.name.partition("-group-")[0], []).extend(_read(file))
    saved = [shown for _, shown in sorted(steps.items()) if shown]
    if not saved:
        return []
    mixed = [shown for group in saved for shown in group if len(_versions(shown.trajectory)) > 1]
    third = max(mixed, key=_reward) if mixed else min(reversed(saved[-1]), key=_reward)
    wanted = (min(saved[0], key=_reward), max(saved[-1], key=_reward), third)
    return list({(shown.file, shown.member): shown for shown in wanted}.values())


def _versions(trajectory: Trajectory) -> set[int]:
    return {version for _, version in trajectory.weight_version_spans if version != NOT_SAMPLED}


def _reward(shown: Shown) -> float:
    return shown.reward or 0.0


def _read(file: Path) -> Iterator[Shown]:
    try:
        group = loads_group(file.read_bytes())
        for index, member in enumerate(group.members):
            for part in member.trajectories:
                yield Shown(file.stem, index, member.reward, member.reason, codec.loads(part))
    except (RolloutError, TitoError):
        return


def find_tokenizer(run: RunRecord) -> Tokenizer | None:
    """That of the run's checkpoint, or of the model it started from; None when neither is there any more."""
    folders = [run.folder.checkpoints / "hf"]
    model = tomllib.loads(run.config).get("model", {}).get("path") if run.config else None
    folders += [Path(model)] if model else []
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.load(folder)
    return None


def trajectories_html(run: RunRecord) -> str:
    """The section's body."""
    shown = choose(run.folder.trajectories)
    if not shown:
        return "<p class=lead>No trajectory was saved.</p>"
    tokenizer = find_tokenizer(run)
    note = "" if tokenizer else "<p class=lead>The tokenizer is not there any more: ids are shown.</p>"
    return LEGEND + note + "\n".join(_trajectory(item, tokenizer) for item in shown)


LEGEND = (
    "<p class=lead>Grey tokens were read, not trained: prompt and tool results. Coloured tokens were sampled by the "
    "policy and trained; the colour is their probability when they were sampled: <span class='t p0'>over 0.9</span> "
    "<span class='t p1'>over 0.5</span> <span class='t p2'>over 0.1</span> <span class='t p3'>less</span>. The line "
    "under them changes with the weight version. Point at a token for its numbers.</p>"
)


def _trajectory(shown: Shown, tokenizer: Tokenizer | None) -> str:
    trajectory = shown.trajectory
    reward = "none" if shown.reward is None else f"{shown.reward:g}"
    head = (
        f"<b>{html.escape(_place(shown.file))}, member {shown.member}</b> "
        f"reward {reward} ({html.escape(shown.reason)}), {trajectory.n_tokens} tokens, "
        f"{int(trajectory.loss_mask.sum())} trained, turns: {len(trajectory.turns)}, {trajectory.status}"
    )
    pieces = list(_tokens(trajectory, tokenizer))
    prompt_length = trajectory.turns[0].prompt_length if trajectory.turns else 0
    folded = max(prompt_length - OPEN_PROMPT_TOKENS, 0)
    beginning = (
        f"<details><summary>first {folded} tokens</summary>{''.join(pieces[:folded])}</details>" if folded else ""
    )
    return f"<div class=trajectory><p>{head}</p>{beginning}{''.join(pieces[folded:])}</div>"


def _place(file: str) -> str:
    """`step 20, group 93` of a file name."""
    step, _, group = file.removeprefix("step-").partition("-group-")
    return f"step {int(step)}, group {int(group)}" if (step + group).isdigit() else file


def _tokens(trajectory: Trajectory, tokenizer: Tokenizer | None) -> Iterator[str]:
    """One piece of HTML a token; the first token of a turn brings the turn's heading."""
    versions = span_values(trajectory.weight_version_spans, trajectory.n_tokens).tolist()
    turns = {turn.prompt_length: (number, turn) for number, turn in enumerate(trajectory.turns, start=1)}
    for at, token in enumerate(trajectory.token_ids.tolist()):
        heading = ""
        if at in turns:
            number, turn = turns[at]
            span = f"v{turn.version_start}"
            span += f" to v{turn.version_end}" if turn.version_end != turn.version_start else ""
            engine = html.escape(turn.engine_id.partition(":")[0])
            heading = f"<span class=turn>turn {number} · {engine} · {span} · {turn.finish_reason}</span>"
        text = str(token) if tokenizer is None else _visible(tokenizer.token(token))
        if trajectory.loss_mask[at]:
            yield heading + _sampled(at, token, text, float(trajectory.logprobs[at]), versions[at])
        else:
            yield heading + f'<span class=t title="token {at}, id {token}, not trained">{text}</span>'


def _sampled(at: int, token: int, text: str, logprob: float, version: int) -> str:
    probability = exp(logprob)
    colour = next((name for least, name in LIKELY if probability >= least), LIKELY[-1][1])
    title = f"token {at}, id {token}, log-prob {logprob:.4f}, probability {probability:.3f}, version {version}"
    return f'<span class="t {colour} v{version % VERSION_COLOURS}" title="{title}">{text}</span>'


def _visible(text: str) -> str:
    """Escaped, with line ends that can be seen."""
    return html.escape(text).replace("\n", "↵<br>") or "∅"
