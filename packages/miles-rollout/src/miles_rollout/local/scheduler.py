"""Which tokens of which requests the next step computes.

First come, first served under a token budget; long prompts in chunks. A request waits while a running one is still
computing a prefix that both share: it then copies that prefix instead of computing it again.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_rollout.local.kv import KVRows
from miles_rollout.local.routes import shared_routes
from miles_rollout.local.sequence import Sequence

WORTH_WAITING_TOKENS = 16
"""A shared prefix shorter than this is computed again rather than waited for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tokens of one sequence from position `start` on, computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def row(self) -> int:
        assert self.sequence.row is not None
        return self.sequence.row

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def completes(self) -> bool:
        """True when the logits of the last token predict a token that is not known yet."""
        return self.end == self.sequence.n_tokens


class Scheduler:
    """Queue and running set of one engine. The engine thread owns it."""

    def __init__(self, kv: KVRows, *, max_running: int, prefill_chunk: int, token_budget: int) -> None:
        self._kv = kv
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._token_budget = token_budget
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All requests that have not ended, in order of arrival."""
        return sorted([*self.running, *self.waiting], key=_arrival)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def plan(self, version: int) -> tuple[Segment, ...]:
        """Admit what can run and return the next step: segments of one token by row, then longer ones by arrival."""
        self._admit(version)
        segments = self._single_tokens()
        budget = self._token_budget - len(segments)
        for sequence in sorted((s for s in self.running if s.remaining > 1), key=_arrival):
            count = min(sequence.remaining, self._prefill_chunk, budget)
            if count > 0:
                segments.append(Segment(sequence, sequence.computed, count))
                budget -= count
        return tuple(sorted(segments, key=lambda s: (s.count > 1, s.row if s.count == 1 else s.sequence.arrival)))

    def retire(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take a request out; its row rests as prefix cache unless its contents are not trusted."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._leave_row(sequence, trusted=trusted)

    def retract_all(self) -> None:
        """Send every running request back to the queue, in order of arrival."""
        for sequence in self.running:
            self._leave_row(sequence, trusted=True)
            self.add(sequence)
        self.running.clear()

    def _leave_row(self, sequence: Sequence, *, trusted: bool) -> None:
        assert sequence.row is not None
        (self._kv.table.release if trusted else self._kv.table.drop)(sequence.row)
        sequence.leave_row()

    def _single_tokens(self) -> list[Segment]:
        ready = sorted((s for s in self.running if s.remaining == 1), key=_arrival)
        return [Segment(s, s.computed, 1) for s in ready[: self._token_budget]]

    def _admit(self, version: int) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self._max_running:
                return
            if not self._should_wait(sequence, version):
                self.waiting.remove(sequence)
                self._start(sequence, version)

    def _start(self, sequence: Sequence, version: int) -> None:
        key = (sequence.request.extra_key, version)
        table = self._kv.table
        lease = table.acquire(sequence.tokens_T, key, sequence.reuse_limit, sequence.routes)
        self._kv.prepare(lease)
        sequence.row, sequence.computed = lease.row, lease.reused
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.reused
        if sequence.routes is not None:
            reused = slice(0, lease.reused)
            sequence.routes.fill(0, table.routes_RSLK[lease.row, reused], table.route_versions_RS[lease.row, reused])
        self.running.append(sequence)

    def _should_wait(self, sequence: Sequence, version: int) -> bool:
        limit, extra_key = sequence.reuse_limit, sequence.request.extra_key
        computing = [s for s in self.running if s.remaining > 1 and s.request.extra_key == extra_key]
        promised = max((_promised(s, sequence, version) for s in computing), default=0)
        if promised < WORTH_WAITING_TOKENS:
            return False
        _, held = self._kv.table.match(sequence.tokens_T, (extra_key, version), limit, sequence.routes)
        return held < promised


def _promised(computing: Sequence, sequence: Sequence, version: int) -> int:
    """Return how many tokens `sequence` can take from what `computing` will have computed."""
    shared = shared_prefix(sequence.tokens_T[: sequence.reuse_limit], computing.tokens_T)
    return shared_routes(sequence.routes, computing.routes, version, shared)


def shared_prefix(left_T: NDArray[np.int32], right_T: NDArray[np.int32]) -> int:
    """Return how many leading tokens are equal."""
    n = min(len(left_T), len(right_T))
    differs = left_T[:n] != right_T[:n]
    return int(differs.argmax()) if differs.any() else n


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
