"""What becomes of a prompt: drawn, tried again, dropped for good, or trained.

The one place that moves source, ledger and admission, so that they stay in step.
"""

from __future__ import annotations

from collections import Counter

from miles_rollout.config import FailurePolicy, UnusedHandler
from miles_rollout.data.prompts import Draw, PromptKey
from miles_rollout.data.source import PromptSource
from miles_rollout.drops import Drop, DropReason
from miles_rollout.groups import Group
from miles_rollout.ledger import Ledger
from miles_rollout.schedule import Admission


class Settlement:
    """Applies the two policies: `failure_policy` to failed groups, `unused_handler` to stale ones."""

    def __init__(
        self,
        source: PromptSource,
        ledger: Ledger,
        *,
        admission: Admission | None,
        failure_policy: FailurePolicy,
        max_tries: int,
        unused_handler: UnusedHandler,
    ) -> None:
        self._source = source
        self._ledger = ledger
        self._admission = admission
        self._failure_policy = failure_policy
        self._max_tries = max_tries
        self._unused_handler = unused_handler
        self._failures: Counter[PromptKey] = Counter()
        self.counts: Counter[str] = Counter()

    @property
    def admits(self) -> bool:
        return self._admission is None or self._admission.room

    def draw(self) -> Draw | None:
        """Take a prompt to submit now; None when there is none."""
        draw = self._source.draw()
        if draw is None:
            return None
        self._ledger.record_draw(draw)
        self._ledger.record_submit(draw.key)
        if self._admission is not None:
            self._admission.admit()
        return draw

    def drop(self, group: Group, drop: Drop) -> bool:
        """A group was thrown away: give its prompt back (True), or settle it as dropped (False)."""
        if self._admission is not None:
            self._admission.give_back()
        if self._may_retry(group, drop):
            self._source.give_back(group.key)
            self._ledger.record_returned(group.key, drop)
            self.counts["retried_groups"] += 1
            return True
        self._forget(group.key)
        self._ledger.record_dropped(group.key, drop)
        return False

    def train(self, groups: list[Group], step: int, *, version: int | None) -> None:
        """These groups were trained on: their prompts have their outcome."""
        self._ledger.record_trained([group.key for group in groups], step, version=version)
        for group in groups:
            self._forget(group.key)

    def _may_retry(self, group: Group, drop: Drop) -> bool:
        if drop.reason is DropReason.STALE:
            return self._unused_handler == "retry"
        if drop.reason is DropReason.FILTERED:
            return False
        self.counts["failed_groups"] += 1
        self._failures[group.key] += 1
        return self._failure_policy == "retry" and self._failures[group.key] < self._max_tries

    def _forget(self, key: PromptKey) -> None:
        self._failures.pop(key, None)
        self._source.settle(key)
