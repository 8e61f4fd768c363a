"""The ledger: every drawn prompt of every epoch is trained or dropped, exactly once.

    drawn ──► in flight ──► buffered ──► handed out ──► trained
      ▲           │            │             │
      │           └────────────┴─────────────┴────────► dropped (reason)
      └── returned ◄──┴────────┘

Each move is checked when it is made. `close` compares what the ledger believes with what the worker, the buffer and the
source really hold, so a prompt that fell out of one of them is found at the next step, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from miles_rollout.data.prompts import Draw, PromptKey
from miles_rollout.drops import Drop
from miles_rollout.errors import LedgerError
from miles_rollout.events import EventSink, NoEvents
from miles_rollout.groups import Group


class State(StrEnum):
    """Where an unsettled prompt is, or how it settled."""

    DRAWN = "drawn"
    IN_FLIGHT = "in flight"
    BUFFERED = "buffered"
    HANDED_OUT = "handed out"
    RETURNED = "returned"
    TRAINED = "trained"
    DROPPED = "dropped"


SETTLED = frozenset({State.TRAINED, State.DROPPED})
_BEFORE = {
    State.DRAWN: frozenset({State.RETURNED}),
    State.IN_FLIGHT: frozenset({State.DRAWN}),
    State.BUFFERED: frozenset({State.IN_FLIGHT}),
    State.HANDED_OUT: frozenset({State.BUFFERED}),
    State.RETURNED: frozenset({State.DRAWN, State.IN_FLIGHT, State.BUFFERED, State.HANDED_OUT}),
    State.TRAINED: frozenset({State.HANDED_OUT}),
    State.DROPPED: frozenset({State.DRAWN, State.IN_FLIGHT, State.BUFFERED, State.HANDED_OUT}),
}


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is really held: by the worker (drawn, running, or waiting to be put), the buffer, and the source."""

    in_flight: frozenset[PromptKey]
    buffered: frozenset[PromptKey]
    returned: frozenset[PromptKey]


@dataclass(frozen=True, slots=True)
class _Entry:
    state: State
    group_id: int
    attempt: int
    oldest_version: int | None = None


class Ledger:
    """Follows every drawn prompt to its one outcome and writes each move to the events."""

    def __init__(self, events: EventSink | None = None, *, max_staleness: int | None = None) -> None:
        self._events = NoEvents() if events is None else events
        self._open: dict[PromptKey, _Entry] = {}
        self._settled: dict[PromptKey, State] = {}
        self._counts: Counter[State] = Counter()
        self._drop_reasons: Counter[str] = Counter()
        self._drawn = 0
        self._events.append("open", max_staleness=max_staleness)

    def record_draw(self, draw: Draw) -> None:
        """The prompt was taken from the source, for the first time or after it was returned."""
        key = draw.key
        if key in self._settled:
            raise LedgerError(f"prompt {key} was drawn again; it was {self._settled[key]} already")
        if key in self._open:
            self._move(key, State.DRAWN, attempt=draw.attempt)
        else:
            self._open[key] = _Entry(State.DRAWN, draw.group_id, draw.attempt)
            self._drawn += 1
        self._write("draw", key, attempt=draw.attempt)

    def record_submit(self, key: PromptKey) -> None:
        self._move(key, State.IN_FLIGHT)
        self._write("submit", key, attempt=self._open[key].attempt)

    def record_generated(self, group: Group) -> None:
        """All members ended and were graded. The group is still in flight: it has not reached the buffer."""
        self._require(group.key, State.IN_FLIGHT)
        members = [
            {"status": m.status, "oldest_version": m.oldest_version, "n_tokens": m.n_tokens, "seed": m.seed}
            for m in group.members
        ]
        self._write("generated", group.key, attempt=group.attempt, members=members)
        reasons = [member.reason for member in group.members]
        self._write("graded", group.key, attempt=group.attempt, rewards=group.rewards, reasons=reasons)

    def record_put(self, group: Group) -> None:
        self._move(group.key, State.BUFFERED, oldest_version=group.oldest_version)
        self._write("put", group.key, oldest_version=group.oldest_version)

    def record_get(self, group: Group, *, version: int | None) -> None:
        """The group was handed out to be trained on. `version` is the engines' at that moment."""
        self._move(group.key, State.HANDED_OUT)
        self._write("get", group.key, version=version, oldest_version=group.oldest_version)

    def record_returned(self, key: PromptKey, drop: Drop) -> None:
        """The group was dropped and its prompt given back to the source."""
        self._move(key, State.RETURNED)
        self._drop_reasons[str(drop.reason)] += 1
        self._write("drop", key, reason=str(drop.reason), detail=drop.detail, fate="retry")

    def record_dropped(self, key: PromptKey, drop: Drop) -> None:
        """The prompt is dropped for good: its outcome."""
        self._require(key, *_BEFORE[State.DROPPED])
        self._drop_reasons[str(drop.reason)] += 1
        self._write("drop", key, reason=str(drop.reason), detail=drop.detail, fate="final")
        self._settle(key, State.DROPPED, reason=str(drop.reason))

    def record_trained(self, keys: Iterable[PromptKey], step: int, *, version: int | None = None) -> None:
        """These prompts were trained on in `step`; `version` is that of the weights the step began with.

        Raises:
            LedgerError: one was not handed out, has settled before, or occurs twice. Nothing is recorded then.
        """
        batch = [PromptKey(*key) for key in keys]
        repeated = [key for key, count in Counter(batch).items() if count > 1]
        if repeated:
            raise LedgerError(f"step {step} trains on {_names(repeated)} more than once")
        for key in batch:
            self._require(key, State.HANDED_OUT)
        for key in batch:
            self._write("train", key, step=step, version=version, oldest_version=self._open[key].oldest_version)
            self._settle(key, State.TRAINED, reason="")

    def record_update(self, version: int, digest: str) -> None:
        """The engines have these weights."""
        self._events.append("update", version=version, digest=digest)

    def close(
        self,
        step: int,
        *,
        in_flight: Iterable[PromptKey],
        buffered: Iterable[PromptKey],
        returned: Iterable[PromptKey],
        handed_out: Iterable[PromptKey] = (),
    ) -> None:
        """Check that everything drawn is settled or really held where the ledger has it. No `await` may lie between
        taking the holdings and this call.

        Raises:
            LedgerError: with the prompts that are missing or too many, and where.
        """
        held = {
            State.IN_FLIGHT: {PromptKey(*key) for key in in_flight},
            State.BUFFERED: {PromptKey(*key) for key in buffered},
            State.RETURNED: {PromptKey(*key) for key in returned},
            State.HANDED_OUT: {PromptKey(*key) for key in handed_out},
        }
        believed: dict[State, set[PromptKey]] = {state: set() for state in held}
        for key, entry in self._open.items():
            believed[State.IN_FLIGHT if entry.state is State.DRAWN else entry.state].add(key)
        faults = [fault for state in held for fault in _differences(state, believed[state], held[state])]
        settled = self._counts[State.TRAINED] + self._counts[State.DROPPED]
        if self._drawn != settled + len(self._open):
            faults.append(f"{self._drawn} prompts were drawn; {settled} are settled and {len(self._open)} open")
        if faults:
            raise LedgerError(f"the ledger does not close at step {step}: " + "; ".join(faults))

    def state(self, key: PromptKey) -> State | None:
        """Where the prompt is, or how it settled; None when it was never drawn."""
        entry = self._open.get(key)
        return entry.state if entry is not None else self._settled.get(key)

    def counts(self) -> dict[str, int]:
        """`drawn` (prompts ever), one count per state, and one per drop reason as `drop/<reason>`."""
        states = Counter(entry.state for entry in self._open.values()) + self._counts
        by_state = {str(state): states[state] for state in State}
        return {**by_state, "drawn": self._drawn, **{f"drop/{name}": n for name, n in self._drop_reasons.items()}}

    def _move(self, key: PromptKey, to: State, **changes: Any) -> None:
        entry = self._require(key, *_BEFORE[to])
        self._open[key] = replace(entry, state=to, **changes)

    def _require(self, key: PromptKey, *states: State) -> _Entry:
        entry = self._open.get(key)
        if entry is None:
            was = self._settled.get(key)
            raise LedgerError(f"prompt {key} " + (f"is settled already: it was {was}" if was else "was never drawn"))
        if entry.state not in states:
            allowed = " or ".join(sorted(states))
            raise LedgerError(f"prompt {key} (group {entry.group_id}) is {entry.state}; it must be {allowed} here")
        return entry

    def _settle(self, key: PromptKey, outcome: State, *, reason: str) -> None:
        self._write("settle", key, outcome=str(outcome), reason=reason)
        del self._open[key]
        self._settled[key] = outcome
        self._counts[outcome] += 1

    def _write(self, kind: str, key: PromptKey, **fields: Any) -> None:
        group_id = self._open[key].group_id
        self._events.append(kind, prompt_id=key.prompt_id, epoch=key.epoch, group_id=group_id, **fields)


def _differences(state: State, believed: set[PromptKey], held: set[PromptKey]) -> list[str]:
    pairs: Mapping[str, set[PromptKey]] = {"are missing": believed - held, "are unaccounted for": held - believed}
    return [
        f"{_names(keys)} should be {state} and {fault}"
        if fault == "are missing"
        else f"{_names(keys)} {fault} ({state})"
        for fault, keys in pairs.items()
        if keys
    ]


def _names(keys: Iterable[PromptKey]) -> str:
    listed = sorted(keys)
    shown = ", ".join(str(key) for key in listed[:8])
    return f"{len(listed)} prompts [{shown}{', …' if len(listed) > 8 else ''}]"
