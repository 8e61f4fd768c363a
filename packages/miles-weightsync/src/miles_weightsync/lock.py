"""The update lock: one update at a time, held as a lease with a fencing token. Pure: the caller gives the time."""

from __future__ import annotations

from dataclasses import dataclass

from miles_weightsync.errors import LockError


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds the lock, with which token, and when it ends."""

    owner: str
    token: int
    ends_at_s: float


class UpdateLock:
    """A lease that ends `lease_s` seconds after its last renewal. Tokens count up from 1 with each grant."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lease: Lease | None = None
        self._granted = 0

    def holder(self, now_s: float) -> str | None:
        """The owner of a living lease."""
        lease = self._living(now_s)
        return lease.owner if lease else None

    def acquire(self, owner: str, now_s: float) -> int:
        """Take the lock; returns the fencing token. Not re-entrant. Raises LockError (code `locked`)."""
        lease = self._living(now_s)
        if lease is not None:
            wait_s = lease.ends_at_s - now_s
            raise LockError("locked", f"{lease.owner} holds the update lock for up to {wait_s:.0f} s more")
        self._granted += 1
        self._lease = Lease(owner, self._granted, now_s + self._lease_s)
        return self._granted

    def use(self, owner: str, token: int, now_s: float) -> None:
        """Check that owner and token still hold the lock. Raises LockError (code `fenced`)."""
        lease = self._living(now_s)
        if lease is None or (lease.owner, lease.token) != (owner, token):
            raise LockError("fenced", f"{owner} no longer holds the update lock with token {token}: start a new update")

    def renew(self, owner: str, token: int, now_s: float) -> None:
        """Start the lease anew. Raises LockError (code `fenced`)."""
        self.use(owner, token, now_s)
        self._lease = Lease(owner, token, now_s + self._lease_s)

    def release(self, owner: str, token: int, now_s: float) -> None:
        """Give the lock back. Raises LockError (code `fenced`)."""
        self.use(owner, token, now_s)
        self._lease = None

    def _living(self, now_s: float) -> Lease | None:
        return self._lease if self._lease is not None and now_s < self._lease.ends_at_s else None
