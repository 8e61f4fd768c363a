"""What a run does now, and when each process did what: spans of time, written as `phase` events.

A `phase` event has `role` (the process), `name` (`wait`, `train`, `update`, `evaluate`, `verify`, `save`, `generate`)
and `begin_s`, `end_s` in seconds since 1970.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from miles_rollout import Group
from miles_rollout.events import EventSink
from miles_rollout.groups import Member

JOIN_S = 0.02
"""Turns this close together are one span of generation."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Phase:
    """What the driver does, and since when (seconds since 1970)."""

    name: str
    began_s: float


class Phases:
    """The driver's phases, one at a time."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self.current = Phase("start", time.time())

    def enter(self, name: str) -> None:
        """Be in a phase from now on."""
        self.current = Phase(name, time.time())

    @contextmanager
    def doing(self, name: str, roles: Iterable[str] = ("driver",)) -> Iterator[None]:
        """Be in a phase inside the block; it is recorded for each of `roles` when it ends, also by an error."""
        self.enter(name)
        began_s = self.current.began_s
        try:
            yield
        finally:
            end_s = time.time()
            for role in roles:
                self._events.append("phase", role=role, name=name, begin_s=began_s, end_s=end_s)

    def record_generation(self, members: Iterable[Member]) -> None:
        """When each engine generated for these members, from the turns of their trajectories."""
        for engine, spans in sorted(generation_spans(members).items()):
            for begin_s, end_s in spans:
                self._events.append("phase", role=engine, name="generate", begin_s=begin_s, end_s=end_s)


def members_of(groups: Iterable[Group]) -> Iterator[Member]:
    """The members of all groups."""
    for group in groups:
        yield from group.members


def generation_spans(members: Iterable[Member]) -> dict[str, list[Span]]:
    """For each engine the joined times of the turns it generated. Trajectories without turns have none."""
    turns: dict[str, list[Span]] = {}
    for member in members:
        for trajectory in member.trajectories:
            for turn in getattr(trajectory, "turns", ()):
                turns.setdefault(role_of(turn.engine_id), []).append((turn.started_s, turn.ended_s))
    return {engine: joined(spans) for engine, spans in turns.items()}


def role_of(engine_id: str) -> str:
    """The process of an engine id `<name>:<epoch>`."""
    return engine_id.partition(":")[0]


def joined(spans: Iterable[Span], gap_s: float = JOIN_S) -> list[Span]:
    """The union of spans, in order; those less than `gap_s` apart become one."""
    union: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if union and begin_s - union[-1][1] < gap_s:
            union[-1] = (union[-1][0], max(union[-1][1], end_s))
        else:
            union.append((begin_s, end_s))
    return union
