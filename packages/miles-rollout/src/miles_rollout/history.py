"""Proving from `events.jsonl` alone that a run was sound, and telling what became of each prompt.

Checked: every drawn prompt settles exactly once; nothing is trained twice or without having been handed out; no trained
token is older than the limit; a version has one digest and versions rise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_rollout.data.prompts import PromptKey

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class History:
    """What a run's events prove. `faults` is empty in a sound run; `open_prompts` have no outcome (yet)."""

    faults: tuple[str, ...]
    drawn: int
    outcomes: Mapping[str, int]
    drop_reasons: Mapping[str, int]
    retries: int
    open_prompts: tuple[PromptKey, ...]
    max_trained_staleness: int | None

    @property
    def sound(self) -> bool:
        return not self.faults


@dataclass(slots=True)
class _Check:
    limit: int | None
    faults: list[str] = field(default_factory=list)
    outcomes: dict[PromptKey, str] = field(default_factory=dict)
    drawn: dict[PromptKey, None] = field(default_factory=dict)
    handed_out: set[PromptKey] = field(default_factory=set)
    trained: dict[PromptKey, int] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    version: int | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    staleness: list[int] = field(default_factory=list)


def check_history(events: Iterable[Event], *, max_staleness: int | None = None, finished: bool = False) -> History:
    """Check the events of a run.

    Args:
        events: in the order they were written, for example from `read_events`.
        max_staleness: the limit; by default the one that the ledger wrote when it was opened.
        finished: the run says it is over, so a prompt without an outcome is a fault.
    """
    check = _Check(max_staleness)
    for event in events:
        step = _STEPS.get(event["kind"])
        if step is not None:
            step(check, event)
    open_prompts = tuple(sorted(key for key in check.drawn if key not in check.outcomes))
    if finished:
        check.faults.extend(f"prompt {key} was drawn and never settled" for key in open_prompts)
    return History(
        faults=tuple(check.faults),
        drawn=len(check.drawn),
        outcomes=Counter(check.outcomes.values()),
        drop_reasons=check.reasons,
        retries=check.retries,
        open_prompts=open_prompts,
        max_trained_staleness=max(check.staleness, default=None),
    )


def prompt_story(events: Iterable[Event]) -> dict[PromptKey, list[str]]:
    """One line an event for every drawn prompt, in draw order."""
    stories: dict[PromptKey, list[str]] = {}
    for event in events:
        if "prompt_id" in event:
            stories.setdefault(_key(event), []).append(_line(event))
    return stories


def _key(event: Event) -> PromptKey:
    return PromptKey(event["prompt_id"], event["epoch"])


def _line(event: Event) -> str:
    hidden = {"t", "kind", "prompt_id", "epoch", "group_id"}
    details = ", ".join(
        f"{name} {value}" for name, value in event.items() if name not in hidden and value not in ("", None)
    )
    return f"{event['kind']}: {details}" if details else str(event["kind"])


def _open(check: _Check, event: Event) -> None:
    if check.limit is None:
        check.limit = event.get("max_staleness")


def _draw(check: _Check, event: Event) -> None:
    key = _key(event)
    check.drawn[key] = None
    if key in check.outcomes:
        check.faults.append(f"prompt {key} was drawn again; it was {check.outcomes[key]} already")


def _drop(check: _Check, event: Event) -> None:
    check.reasons[event["reason"]] += 1
    check.retries += event["fate"] == "retry"
    check.handed_out.discard(_key(event))


def _get(check: _Check, event: Event) -> None:
    check.handed_out.add(_key(event))


def _train(check: _Check, event: Event) -> None:
    key, step = _key(event), event["step"]
    if key in check.trained:
        check.faults.append(f"prompt {key} was trained in step {check.trained[key]} and again in step {step}")
    if key not in check.handed_out:
        check.faults.append(f"prompt {key} was trained in step {step} and had not been handed out")
    check.trained[key] = step
    version = event["version"] if event["version"] is not None else check.version
    if version is None or event["oldest_version"] is None:
        return
    staleness, trained = version - event["oldest_version"], f"prompt {key}, trained in step {step},"
    check.staleness.append(staleness)
    if staleness < 0:
        check.faults.append(f"{trained} has tokens of version {event['oldest_version']}; the step was at {version}")
    if check.limit is not None and staleness > check.limit:
        check.faults.append(f"{trained} was {staleness} versions old; the limit is {check.limit}")


def _settle(check: _Check, event: Event) -> None:
    key, outcome = _key(event), event["outcome"]
    if key in check.outcomes:
        check.faults.append(f"prompt {key} settled as {check.outcomes[key]} and again as {outcome}")
    if key not in check.drawn:
        check.faults.append(f"prompt {key} settled as {outcome} and was never drawn")
    if (outcome == "trained") != (key in check.trained):
        check.faults.append(
            f"prompt {key} settled as {outcome}; {'no' if outcome == 'trained' else 'a'} step trained it"
        )
    check.outcomes[key] = outcome


def _update(check: _Check, event: Event) -> None:
    version, digest = event["version"], event["digest"]
    known = check.digests.setdefault(version, digest)
    if known != digest:
        check.faults.append(f"version {version} has the digests {known} and {digest}")
    if check.version is not None and version < check.version:
        check.faults.append(f"version {version} came after version {check.version}")
    check.version = version


_STEPS = {
    "open": _open,
    "draw": _draw,
    "drop": _drop,
    "get": _get,
    "train": _train,
    "settle": _settle,
    "update": _update,
}
