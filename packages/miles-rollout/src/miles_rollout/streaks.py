"""Ending a run in which groups only fail, or are only filtered out, instead of sampling for ever."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from miles_rollout.config import WorkerConfig
from miles_rollout.data.prompts import PromptKey
from miles_rollout.drops import Drop, DropReason
from miles_rollout.episodes import Episode
from miles_rollout.errors import ConsecutiveFailuresError, FilterRejectsEverythingError, WorkerError
from miles_rollout.groups import Group

REJECT_LIMIT_BATCHES = 80


class Streaks:
    """Counts prompts that failed in a row, and groups that were rejected in a row; remembers the first failure.

    Several tries at one prompt count once: a single bad prompt does not end a run.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._fail_at_once = config.failure_policy == "fail"
        self._failure_limit = config.max_consecutive_failures or config.batch_groups
        rejects = config.max_consecutive_rejects
        self._reject_limit = REJECT_LIMIT_BATCHES * config.batch_groups if rejects is None else rejects
        self._failed: set[PromptKey] = set()
        self._rejected = 0
        self._first_failure: BaseException | None = None

    def follow(self, group: Group, drop: Drop | None, outcomes: Sequence[Episode]) -> None:
        """Take in what the buffer did with a group.

        Raises:
            ConsecutiveFailuresError, FilterRejectsEverythingError: the limit is reached.
            BaseException: the group's own failure, under `failure_policy` "fail".
        """
        if drop is None:
            self._rejected = 0
            self._end_failures()
        elif drop.reason is DropReason.FILTERED:
            self._end_failures()
            self._count_reject(drop)
        else:
            failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
            self._count_failure(group, drop, failures[0] if failures else None)

    def _end_failures(self) -> None:
        self._failed.clear()
        self._first_failure = None

    def _count_failure(self, group: Group, drop: Drop, failure: BaseException | None) -> None:
        if self._fail_at_once:
            raise failure or WorkerError(f"prompt {group.key} failed (worker.failure_policy is 'fail'): {drop.detail}")
        self._failed.add(group.key)
        self._first_failure = self._first_failure or failure
        if len(self._failed) < self._failure_limit:
            return
        first = self._first_failure
        trace = "".join(traceback.format_exception(first)) if first is not None else drop.detail
        raise ConsecutiveFailuresError(
            f"{len(self._failed)} prompts failed in a row (worker.max_consecutive_failures is {self._failure_limit}); "
            f"the first failure:\n{trace}"
        ) from first

    def _count_reject(self, drop: Drop) -> None:
        self._rejected += 1
        if self._reject_limit and self._rejected >= self._reject_limit:
            raise FilterRejectsEverythingError(
                f"the filter rejected {self._rejected} groups in a row, the last for {drop.detail or 'no reason'}: "
                "make the task easier or harder so that rewards differ within a group, or change buffer.filter"
            )
