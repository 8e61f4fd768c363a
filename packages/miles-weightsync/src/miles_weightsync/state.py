"""The state of one engine's weights, as its receiver sees it: which call is allowed when, and what each does.

    serving(v) -> paused(v) -> updating(v->w) -> verifying(w) -> paused(w) -> serving(w)

Any failure after the first byte landed leads to `poisoned`, which only a full install leaves. Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from miles_weightsync.errors import SessionError

EngineState = Literal["serving", "paused", "updating", "verifying", "poisoned", "stale"]
Admission = Literal["apply", "ignored"]


@dataclass(frozen=True, slots=True)
class Session:
    """An update session: `token` fences older ones, `buckets` is how many will come."""

    name: str
    token: int
    target: int
    buckets: int
    full: bool = True


@dataclass(slots=True)
class _OpenSession:
    session: Session
    entered_from: EngineState
    applied: list[str] = field(default_factory=list)
    corrupt: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StateView:
    """What `describe` says. `version` is the last committed one, None when no whole version is installed."""

    state: EngineState
    version: int | None
    epoch: int
    manifest: str | None
    session: str | None
    target: int | None
    last_token: int

    @property
    def routable(self) -> bool:
        """Whether requests may go to this engine."""
        return self.state == "serving"


class ReceiverState:
    """The receiver's side of the session protocol. Not thread-safe: the receiver calls it under its lock.

    Calls raise SessionError with the code of the rule that was broken.
    """

    def __init__(
        self, version: int | None = 0, epoch: int = 1, state: EngineState = "serving", last_token: int = 0
    ) -> None:
        self._version = version
        self._epoch = epoch
        self._state: EngineState = state
        self._last_token = last_token
        self._manifest: str | None = None
        self._open: _OpenSession | None = None
        self._committed: tuple[str, int, str] | None = None

    def describe(self) -> StateView:
        """The state now."""
        session = self._open.session if self._open else None
        return StateView(
            state=self._state,
            version=self._version,
            epoch=self._epoch,
            manifest=self._manifest,
            session=session.name if session else None,
            target=session.target if session else None,
            last_token=self._last_token,
        )

    def pause(self) -> None:
        """Stop serving; in any other state nothing changes."""
        if self._state == "serving":
            self._state = "paused"

    def check_resume(self) -> None:
        """Raise SessionError (codes `poisoned`, `stale`, `state`) when the engine must not serve."""
        if self._state in ("poisoned", "stale"):
            raise SessionError(self._state, f"a {self._state} engine serves only after a full install was committed")
        if self._state not in ("paused", "serving"):
            raise SessionError("state", f"cannot resume while {self._state}: commit or abort the session first")

    def resume(self) -> None:
        """Serve again. Raises as `check_resume`."""
        self.check_resume()
        self._state = "serving"

    def begin(self, session: Session) -> None:
        """Open a session. Raises SessionError (codes `fenced`, `session_open`, `state`, `needs_full`)."""
        self._fence(session.token)
        if self._open is not None:
            raise SessionError(
                "session_open", f"session {self._open.session.name} is open: abort it or let it time out"
            )
        if self._state == "serving":
            raise SessionError("state", "an engine must be paused before an update begins")
        if self._state in ("poisoned", "stale") and not session.full:
            raise SessionError("needs_full", f"a {self._state} engine needs a full install")
        self._last_token = session.token
        self._open = _OpenSession(session, self._state)
        self._state = "updating"

    def admit_bucket(self, token: int, session: str, index: int, digest: str) -> Admission:
        """Whether a bucket is to be applied, or was already (`ignored`).

        Raises SessionError (codes `fenced`, `no_session`, `conflict`, `order`); nothing changes.
        """
        current = self._require_session(token, session)
        applied = current.applied
        if 0 <= index < len(applied):
            if applied[index] == digest:
                return "ignored"
            raise SessionError("conflict", f"bucket {index} was applied with digest {applied[index]}, not {digest}")
        if index != len(applied) or index >= current.session.buckets:
            raise SessionError(
                "order", f"bucket {index} of {current.session.buckets} came when {len(applied)} was expected"
            )
        return "apply"

    def bucket_applied(self, digest: str) -> None:
        """Record that the admitted bucket is stored."""
        self._session().applied.append(digest)

    def bucket_corrupt(self, index: int) -> SessionError:
        """A payload did not match its digest: the second time poisons. Returns the error to raise."""
        current = self._session()
        if index in current.corrupt:
            self.poison()
            return SessionError("digest", f"bucket {index} arrived damaged twice: the engine is poisoned")
        current.corrupt.add(index)
        return SessionError("digest", f"bucket {index} arrived damaged: send it again")

    def load_failed(self, reason: str) -> SessionError:
        """The engine could not store a bucket: it is poisoned. Returns the error to raise."""
        self.poison()
        return SessionError("load", f"the engine could not store the bucket and is poisoned: {reason}")

    def admit_commit(self, token: int, session: str, version: int, manifest: str) -> Admission:
        """Whether a commit is to be carried out, or was already (`ignored`); the state becomes `verifying`.

        Raises SessionError (codes `fenced`, `no_session`, `conflict`, `incomplete`); the session stays open.
        """
        self._fence(token)
        if self._open is None and self._committed == (session, version, manifest):
            return "ignored"
        current = self._require_session(token, session)
        target, missing = current.session.target, current.session.buckets - len(current.applied)
        if version != target:
            raise SessionError("conflict", f"the session installs version {target}, the commit names {version}")
        if missing:
            raise SessionError("incomplete", f"{missing} of {current.session.buckets} buckets are missing")
        self._state = "verifying"
        return "apply"

    def commit(self, manifest: str, computed: str) -> None:
        """Take the new version if the stored bytes are those of the manifest.

        Raises SessionError (code `digest`), and the engine is poisoned, when `computed` is not `manifest`.
        """
        session = self._session().session
        if computed != manifest:
            self.poison()
            raise SessionError("digest", f"stored weights have manifest {computed}, sent was {manifest}")
        self._version, self._manifest = session.target, manifest
        self._committed = (session.name, session.target, manifest)
        self._open = None
        self._state = "paused"

    def abort(self, token: int, session: str) -> None:
        """End the session: back to the state before it, or poisoned when a bucket was applied."""
        self._require_session(token, session)
        self._drop_session()

    def timeout(self) -> None:
        """The session's owner is gone: end it as `abort` does. Without a session nothing happens."""
        if self._open is not None:
            self._drop_session()

    def poison(self) -> None:
        """End any session; no version is known to be whole."""
        self._open = None
        self._state, self._version, self._manifest, self._committed = "poisoned", None, None, None

    def restart(self) -> None:
        """The engine is a new process: next epoch, stale at version 0."""
        self.poison()
        self._state, self._version, self._epoch, self._last_token = "stale", 0, self._epoch + 1, 0

    def _drop_session(self) -> None:
        current = self._session()
        if current.applied:
            self.poison()
        else:
            self._open = None
            self._state = current.entered_from

    def _fence(self, token: int) -> None:
        if token < self._last_token:
            raise SessionError("fenced", f"token {token} is older than {self._last_token}: another publisher took over")

    def _require_session(self, token: int, session: str) -> _OpenSession:
        self._fence(token)
        if self._open is None or self._open.session.name != session:
            raise SessionError("no_session", f"session {session} is not open (it ended, timed out or never began)")
        return self._open

    def _session(self) -> _OpenSession:
        if self._open is None:
            raise SessionError("no_session", "no session is open")
        return self._open
