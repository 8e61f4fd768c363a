"""A receiver's place in a broadcast group. Torch is imported only when a group is joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_weightsync.errors import SessionError
from miles_weightsync.messages import Join

if TYPE_CHECKING:
    from miles_weightsync.transports.gloo import Group


class GroupMember:
    """At most one broadcast group at a time."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._name = ""

    def join(self, request: Join) -> None:
        """Join a group; blocks until all members have. Raises SessionError (code `transport`), MissingExtraError."""
        from miles_weightsync.transports.gloo import join_group

        self.leave()
        self._group = join_group(request)
        self._name = request.group

    def receive(self, group: str, nbytes: int) -> memoryview:
        """Receive a broadcast of `nbytes` bytes. Raises SessionError, TransportError."""
        if self._group is None or self._name != group:
            raise SessionError("transport", f"this engine is not in broadcast group {group}")
        return self._group.receive(nbytes)

    def leave(self) -> None:
        """Leave the group, if any."""
        self._group = None
