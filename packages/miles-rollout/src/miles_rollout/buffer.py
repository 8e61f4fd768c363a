"""The bounded buffer between generation and training, and the three reasons for which it drops a group.

| reason | looked at | prompt |
|---|---|---|
| generation failed: a trajectory of a member was aborted | on put, first | reusable |
| filter says no | on put, second | never reusable |
| stale: current version - oldest version in the group > limit | when the group is handed out | reusable |

What becomes of a dropped group's prompt is decided by `on_drop`. All calls belong on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from miles_rollout.buffer_window import BufferWindow
from miles_rollout.config import BufferConfig
from miles_rollout.drops import Drop, DropReason
from miles_rollout.filters import Filter, judge, load_filter
from miles_rollout.groups import Group

VersionProvider = Callable[[], int | None]
"""The weight version of the engines now; None before it is known."""

DropHandler = Callable[[Group, Drop], None]
AcceptHandler = Callable[[Group], None]


class Buffer(Protocol):
    """What the worker needs of a buffer; a replacement owns storage, order and all filtering."""

    async def put(self, group: Group) -> Drop | None: ...

    async def get_many(self, count: int) -> list[Group]: ...

    def groups(self) -> list[Group]: ...

    def end(self) -> None: ...

    def reopen(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def get_metrics(self) -> dict[str, float]: ...


def _ignore(group: Group) -> None:
    return


class GroupBuffer:
    """FIFO with a capacity in groups; `oldest_first` serves by draw order instead.

    Staleness is judged against the version at the moment a group is handed out, not when the call began. Being at the
    limit is accepted; a group without versions, or a moment without a known version, is never stale. `on_accept` and
    `on_drop` run at the very moment a group enters or is thrown away.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        batch_groups: int,
        version: VersionProvider,
        on_drop: DropHandler,
        on_accept: AcceptHandler = _ignore,
        oldest_first: bool = False,
        capacity_groups: int | None = None,
        accept: Filter | None = None,
    ) -> None:
        self.capacity_groups = capacity_groups or config.capacity_groups(batch_groups)
        self._max_staleness = config.max_staleness
        self._accept = load_filter(config.filter) if accept is None and config.filter else accept
        self._version = version
        self._on_drop = on_drop
        self._on_accept = on_accept
        self._oldest_first = oldest_first
        self._queue: deque[Group] = deque()
        self._blocked: deque[tuple[Group, asyncio.Future[None]]] = deque()
        self._taken: list[list[Group]] = []
        self._changed = asyncio.Event()
        self._ended = False
        self._failure: BaseException | None = None
        self._seen_version: int | None = None
        self._window = BufferWindow()

    async def put(self, group: Group) -> Drop | None:
        """Take a finished group, waiting its turn while the buffer is full. Returns the drop when it was refused.

        A refused group never waits. A call cancelled while it waits leaves the group out.
        """
        drop = self._refusal(group)
        if drop is not None:
            self._on_drop(group, drop)
            return drop
        if len(self._queue) < self.capacity_groups and not self._blocked:
            self._enter(group)
        else:
            await self._wait_for_room(group)
        return None

    async def get(self, **context: object) -> Group:
        """The next group that is not stale, waiting while there is none. Context keys are for other buffers.

        A cancelled call loses no group. Raises asyncio.QueueEmpty when the buffer has ended and is empty.
        """
        groups = await self.get_many(1)
        if not groups:
            raise asyncio.QueueEmpty
        return groups[0]

    async def get_many(self, count: int) -> list[Group]:
        """`count` groups, none of which is stale at the moment of return; fewer only when the buffer has ended.

        A cancelled call puts back what it had taken. `count` may exceed the capacity.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        taken: list[Group] = []
        self._taken.append(taken)
        try:
            while not await self._fill(taken, count):
                pass
        except BaseException:
            self._queue.extendleft(reversed(taken))
            raise
        finally:
            self._taken = [other for other in self._taken if other is not taken]
            self._window.get_wait_s += loop.time() - began
        for group in taken:
            self._window.count_handed(group, self._staleness(group))
        return taken

    def groups(self) -> list[Group]:
        """The groups held now, those taken for a batch that is not complete included."""
        return [group for taken in self._taken for group in taken] + list(self._queue)

    def end(self) -> None:
        """No put will come: a get returns what there is."""
        self._ended = True
        self._notify()

    def reopen(self) -> None:
        """Puts may come again."""
        self._ended = False

    def fail(self, error: BaseException) -> None:
        """Every get, waiting or later, raises this error, even if groups are queued."""
        self._failure = error
        self._notify()

    def get_metrics(self) -> dict[str, float]:
        """The metrics of this training step; the counters of the window begin anew."""
        window, self._window = self._window, BufferWindow()
        seen = self._seen_version
        oldest = [group.oldest_version for group in self._queue]
        queued = [] if seen is None else [seen - version for version in oldest if version is not None]
        return window.metrics(queue_size=len(self._queue), queued_staleness=queued)

    async def _fill(self, taken: list[Group], count: int) -> bool:
        """Screen what was taken and take one more, or wait; True when the batch is complete."""
        if self._failure is not None:
            raise self._failure
        taken[:] = [group for group in taken if self._still_fresh(group)]
        if len(taken) == count:
            return True
        if self._queue:
            taken.append(self._take())
            return False
        if self._ended:
            return True
        await self._changed.wait()
        return False

    def _refusal(self, group: Group) -> Drop | None:
        if group.aborted:
            self._window.aborted += 1
            reasons = sorted({member.reason for member in group.members if member.aborted})
            return Drop(DropReason.GENERATION_FAILED, "; ".join(reasons))
        if self._accept is None:
            return None
        verdict = judge(group, self._accept)
        if verdict.keep:
            return None
        if verdict.reason is not None:
            self._window.filtered[verdict.reason] += 1
        return Drop(DropReason.FILTERED, verdict.reason or "")

    async def _wait_for_room(self, group: Group) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        entry = (group, loop.create_future())
        self._blocked.append(entry)
        try:
            await entry[1]
        finally:
            self._window.put_wait_s += loop.time() - began
            if entry in self._blocked:
                self._blocked.remove(entry)

    def _enter(self, group: Group) -> None:
        self._queue.append(group)
        self._on_accept(group)
        self._notify()

    def _take(self) -> Group:
        group = min(self._queue, key=lambda item: item.group_id) if self._oldest_first else self._queue[0]
        self._queue.remove(group)
        while self._blocked and len(self._queue) < self.capacity_groups:
            waiting, turn = self._blocked.popleft()
            if not turn.done():
                turn.set_result(None)
                self._enter(waiting)
        return group

    def _still_fresh(self, group: Group) -> bool:
        staleness, limit = self._staleness(group), self._max_staleness
        if staleness is None or limit is None or staleness <= limit:
            return True
        self._window.count_stale(group, staleness)
        self._on_drop(group, Drop(DropReason.STALE, f"{staleness} versions old, the limit is {limit}"))
        return False

    def _staleness(self, group: Group) -> int | None:
        version = self._version()
        if version is not None:
            self._seen_version = version
        oldest = group.oldest_version
        return None if version is None or oldest is None else version - oldest

    def _notify(self) -> None:
        """Wake every get that waits now."""
        self._changed.set()
        self._changed.clear()
