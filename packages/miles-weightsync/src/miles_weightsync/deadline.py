"""A point in time that bounds a wait."""

from __future__ import annotations

import time

from miles_weightsync.errors import RpcTimeoutError


class Deadline:
    """Ends `seconds` after it was made; `what` names the wait in the error."""

    __slots__ = ("_ends_at_s", "_seconds", "_what")

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what
        self._ends_at_s = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Seconds left, more than 0. Raises RpcTimeoutError when the time is over."""
        left = self._ends_at_s - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    @property
    def over(self) -> bool:
        """True once the time has passed."""
        return time.monotonic() >= self._ends_at_s

    def error(self) -> RpcTimeoutError:
        """The error of this wait."""
        return RpcTimeoutError(f"{self._what}: no answer within {self._seconds:g} s")
