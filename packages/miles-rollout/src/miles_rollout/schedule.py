"""When a new group may be submitted: free slots, and admission by staleness."""

from __future__ import annotations

from miles_rollout.buffer import VersionProvider
from miles_rollout.config import Granularity


class SubmissionSlots:
    """Counts what is under way against a budget of groups.

    Under `group` a slot is a group. Under `sample` every member that ends frees its own slot, and a whole new group
    goes out as soon as its members fit, whichever groups the free slots came from.
    """

    def __init__(self, *, budget_groups: int, group_size: int, granularity: Granularity) -> None:
        self._budget_groups = budget_groups
        self._group_size = group_size
        self._granularity = granularity
        self._members: dict[int, int] = {}

    @property
    def groups(self) -> int:
        return len(self._members)

    @property
    def samples(self) -> int:
        return sum(self._members.values())

    @property
    def room(self) -> bool:
        """Whether a whole group may be submitted."""
        if self._granularity == "group":
            return self.groups < self._budget_groups
        return self.samples + self._group_size <= self._budget_groups * self._group_size

    def open_group(self, group_id: int) -> None:
        self._members[group_id] = self._group_size

    def close_member(self, group_id: int) -> None:
        """A member ended. One that ends after its group was closed has no slot any more."""
        if self._members.get(group_id, 0) > 0:
            self._members[group_id] -= 1

    def close_group(self, group_id: int) -> None:
        """The group ended; slots of members that were abandoned come free too."""
        self._members.pop(group_id, None)


class Admission:
    """Submits only what cannot become stale: admitted < (max_staleness + version + 1) x batch.

    `admitted` counts groups that are under way, buffered or trained; a dropped group gives its admission back. A run
    that begins at version v has trained v batches, so it starts with v x batch admitted.
    """

    def __init__(self, *, max_staleness: int, batch_groups: int, version: VersionProvider) -> None:
        self._max_staleness = max_staleness
        self._batch_groups = batch_groups
        self._version = version
        self.admitted = (version() or 0) * batch_groups

    @property
    def room(self) -> bool:
        return self.admitted < (self._max_staleness + (self._version() or 0) + 1) * self._batch_groups

    def admit(self) -> None:
        self.admitted += 1

    def give_back(self) -> None:
        self.admitted -= 1
