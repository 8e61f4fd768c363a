"""The sessions of one server: created, found, idle ones dropped, all of them counted."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .config import SessionConfig
from .errors import SessionLimitError, SessionNotFoundError
from .families.base import Family
from .matching import matcher_named
from .session import Session


class SessionStore:
    """Sessions by id. Not thread-safe: it belongs to one event loop."""

    def __init__(self, family: Family, config: SessionConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._family = family
        self._config = config
        self._clock = clock
        self._matcher = matcher_named(config.matcher)
        self._sessions: dict[str, Session] = {}
        self._touched_s: dict[str, float] = {}
        self.created = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def create(
        self,
        *,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """Open a session. Raises `SessionLimitError` when the server is full."""
        self.drop_idle()
        if len(self._sessions) >= self._config.max_sessions:
            raise SessionLimitError(
                f"{len(self._sessions)} sessions are open and session.max_sessions is {self._config.max_sessions}: "
                "delete "
                "finished ones, or raise it"
            )
        session = Session(
            uuid.uuid4().hex,
            self._family,
            self._matcher,
            seed=seed,
            sampling=sampling,
            metadata=metadata,
            close_truncated=self._config.on_truncation == "close",
        )
        self._sessions[session.session_id] = session
        self.created += 1
        self.touch(session)
        return session

    def get(self, session_id: str) -> Session:
        """The open session `session_id`. Raises `SessionNotFoundError`, also when it was idle for too long."""
        self.drop_idle()
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(
                f"no session {session_id!r}: it was never created, was deleted, or was idle too long"
            )
        return session

    def delete(self, session_id: str) -> None:
        """Close a session. A generation still running for it is not waited for; its reply is not stored."""
        self.get(session_id).closed = True
        del self._sessions[session_id]
        del self._touched_s[session_id]

    def touch(self, session: Session) -> None:
        """Note that a session was used now."""
        if not session.closed:
            self._touched_s[session.session_id] = self._clock()

    def drop_idle(self) -> None:
        """Close sessions idle for longer than `idle_ttl_s`. One with a request in flight is not idle."""
        ttl_s = self._config.idle_ttl_s
        if not ttl_s:
            return
        oldest = self._clock() - ttl_s
        idle = [name for name, at in self._touched_s.items() if at < oldest and not self._sessions[name].busy]
        for session_id in idle:
            self._sessions.pop(session_id).closed = True
            del self._touched_s[session_id]
        self.expired += len(idle)
