"""The update protocol of one engine, without any network: the state machine and the lock in front of the engine's port.

Every digest is computed here, over the bytes that `port.read` says are stored, before the port is told to commit.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from miles_weightsync.bucket import ALIGNMENT
from miles_weightsync.config import ReceiverConfig, VerifyMode
from miles_weightsync.digest import xxh3
from miles_weightsync.errors import LockError, SessionError, WeightIdentityError, shown
from miles_weightsync.frame import MAX_HEADER_NBYTES, BucketHeader, Frame
from miles_weightsync.lock import UpdateLock
from miles_weightsync.manifest import Manifest, TensorRecord, diff_manifests
from miles_weightsync.protocols import PauseMode, PortDescription, WeightPort
from miles_weightsync.state import Admission, EngineState, ReceiverState, Session, StateView
from miles_weightsync.tensors import Spec, byte_view, tensor_nbytes

T = TypeVar("T")

_PROBED = 3


class WeightGuard:
    """What a publisher may do to an engine, in which order. Thread-safe; one call at a time reaches the port.

    A session without a call for `config.session_timeout_s` is ended by `expire_idle`, which the receiver calls.
    """

    def __init__(self, port: WeightPort, config: ReceiverConfig, *, stale: bool | None = None) -> None:
        description = port.describe()
        self._port = port
        self._engine_id = description.engine_id
        self._timeout_s = config.session_timeout_s
        self._lock = threading.Lock()
        self._lease = UpdateLock(config.lock.lease_s)
        self._lease_token = 0
        self._last_call_s = time.monotonic()
        self._receiving = 0
        self._state = ReceiverState(description.version, description.epoch, _first_state(description, stale))
        self.max_frame_nbytes = _largest_frame(description)

    def describe(self) -> tuple[StateView, PortDescription]:
        """State and the engine's own description."""
        with self._lock:
            return self._state.describe(), self._ask_port("describe", self._port.describe)

    def acquire(self, owner: str) -> int:
        """Take the engine's update lock; returns the fencing token. Raises LockError (code `locked`)."""
        with self._lock:
            self._lease_token = self._lease.acquire(owner, time.monotonic())
            return self._lease_token

    def release(self, owner: str, token: int) -> None:
        """Give the lock back. Raises LockError (code `fenced`) when it was lost."""
        with self._lock:
            self._lease.release(owner, token, time.monotonic())

    def pause(self, mode: PauseMode) -> None:
        """Stop generating and wait until the engine has stopped."""
        with self._lock:
            self._ask_port("pause", lambda: self._port.pause(mode))
            self._state.pause()

    def flush(self) -> None:
        """Drop cached prefixes."""
        with self._lock:
            self._ask_port("flush", self._port.flush)

    def begin(self, owner: str, session: Session) -> None:
        """Open a session. Needs the lock."""
        with self._lock:
            self._use_lease(owner, session.token)
            self._state.begin(session)
            try:
                self._ask_port("begin", lambda: self._port.begin(session.name, session.target))
            except SessionError:
                self._state.abort(session.token, session.name)
                raise
            self._last_call_s = time.monotonic()

    def admit(self, owner: str, token: int, session: str, index: int, digest: str) -> Admission:
        """Whether a bucket's bytes are wanted. After the answer `apply`, `arrived` must follow, come what may."""
        with self._lock:
            self._use_lease(owner, token)
            admission = self._state.admit_bucket(token, session, index, digest)
            if admission == "apply":
                self._receiving += 1
            return admission

    def arrived(self) -> None:
        """The bytes of an admitted bucket have come, or will not come."""
        with self._lock:
            self._receiving -= 1
            self._last_call_s = time.monotonic()

    def apply(self, owner: str, token: int, session: str, index: int, digest: str, frame: Frame) -> Admission:
        """Store an admitted bucket that has arrived whole."""
        with self._lock:
            self._use_lease(owner, token)
            if self._state.admit_bucket(token, session, index, digest) == "ignored":
                return "ignored"
            self._check_header(frame.header, session, index)
            if frame.digest != digest:
                raise self._corrupt(index)
            self._load(frame)
            self._state.bucket_applied(digest)
            return "apply"

    def damaged(self, token: int, session: str, index: int, digest: str) -> SessionError:
        """An admitted bucket arrived damaged. Returns the error to answer."""
        with self._lock:
            self._state.admit_bucket(token, session, index, digest)
            return self._corrupt(index)

    def commit(
        self, owner: str, token: int, session: str, version: int, sent: Manifest, verify: VerifyMode
    ) -> Admission:
        """Read back what is stored, compare it with the manifest, and take the version.

        Raises WeightIdentityError, and the engine is poisoned, when any tensor's bytes are not the manifest's.
        """
        with self._lock:
            if self._state.describe().session is not None:
                self._use_lease(owner, token)
            if self._state.admit_commit(token, session, version, sent.digest) == "ignored":
                return "ignored"
            stored = self._stored_manifest(sent, verify)
            try:
                self._state.commit(sent.digest, stored.digest)
            except SessionError:
                raise self._identity_error(sent, stored) from None
            self._commit_port(version, sent.digest)
            return "apply"

    def abort(self, token: int, session: str) -> None:
        """End the session; poisons the engine when a bucket was applied."""
        with self._lock:
            self._state.abort(token, session)
            self._leave("the update was aborted after bytes had landed")

    def resume(self) -> None:
        """Generate again, unless the engine is poisoned, stale or in the middle of an update."""
        with self._lock:
            self._state.check_resume()
            self._ask_port("resume", self._port.resume)
            self._state.resume()

    def digests(self) -> dict[str, str]:
        """The digest of every tensor as stored now."""
        with self._lock:
            expected = self._ask_port("describe", self._port.describe).expected_tensors
            return {spec.name: self._digest_stored(spec.name) for spec in expected}

    def poison(self, reason: str) -> None:
        """Take the engine out of service until a full install."""
        with self._lock:
            self._state.poison()
            self._poison_port(reason)

    def expire_idle(self) -> tuple[bool, float]:
        """End a session without a call for too long. Returns whether it did, and the seconds until the next look."""
        with self._lock:
            if self._state.describe().session is None or self._receiving:
                return False, self._timeout_s
            left_s = self._last_call_s + self._timeout_s - time.monotonic()
            if left_s > 0:
                return False, left_s
            self._state.timeout()
            self._leave(f"the publisher was silent for {self._timeout_s:g} s in the middle of an update")
            self._free_lease()
            return True, self._timeout_s

    def disconnected(self, token: int | None) -> None:
        """A publisher's connection is gone: without an open session its lock is free at once."""
        with self._lock:
            if self._state.describe().session is None and token == self._lease_token:
                self._free_lease()

    def _free_lease(self) -> None:
        holder = self._lease.holder(time.monotonic())
        if holder is not None:
            self._lease.release(holder, self._lease_token, time.monotonic())

    def _use_lease(self, owner: str, token: int) -> None:
        try:
            self._lease.renew(owner, token, time.monotonic())
        except LockError as error:
            raise SessionError("fenced", str(error)) from None
        self._last_call_s = time.monotonic()

    def _corrupt(self, index: int) -> SessionError:
        error = self._state.bucket_corrupt(index)
        if self._state.describe().state == "poisoned":
            self._poison_port(str(error))
        return error

    def _check_header(self, header: BucketHeader, session: str, index: int) -> None:
        wanted = (session, index, str(self._state.describe().target))
        found = (header.session, header.bucket, header.version)
        if found != wanted:
            raise SessionError(
                "conflict", f"the frame is of (session, bucket, version) {found}, announced was {wanted}"
            )

    def _load(self, frame: Frame) -> None:
        try:
            self._port.load(frame.tensors())
        except Exception as error:
            failure = self._state.load_failed(_reason(error))
            self._poison_port(str(failure))
            raise failure from error
        self._last_call_s = time.monotonic()

    def _stored_manifest(self, sent: Manifest, verify: VerifyMode) -> Manifest:
        """The manifest of what is stored; tensors that `verify` leaves out are taken as sent."""
        names = set(names_to_verify(sent, verify))
        records = tuple(self._stored_record(r) if r.name in names else r for r in sent.tensors)
        known = {record.name for record in records}
        expected = {spec.name for spec in self._ask_port("describe", self._port.describe).expected_tensors}
        if known != expected:
            self._fail_commit(f"the manifest lacks or adds {shown(sorted(known ^ expected))}")
        return Manifest(sent.version, records, sent.base)

    def _stored_record(self, sent: TensorRecord) -> TensorRecord:
        try:
            return TensorRecord(sent.name, sent.dtype, sent.shape, self._digest_stored(sent.name))
        except SessionError as error:
            self._fail_commit(str(error))
            raise

    def _digest_stored(self, name: str) -> str:
        data = self._ask_port("read", lambda: self._port.read(name))
        return xxh3(byte_view(data))

    def _identity_error(self, sent: Manifest, stored: Manifest) -> WeightIdentityError:
        names = diff_manifests(sent, stored).names
        message = (
            f"engine {self._engine_id} stores other bytes than were sent in {len(names)} of {len(sent.tensors)} "
            f"tensors ({shown(names)}): it is poisoned and needs a full install"
        )
        self._poison_port(message)
        return WeightIdentityError(message, names, self._engine_id)

    def _commit_port(self, version: int, digest: str) -> None:
        try:
            self._ask_port("commit", lambda: self._port.commit(version, digest))
        except SessionError as error:
            self._fail_commit(str(error))

    def _fail_commit(self, reason: str) -> None:
        self._state.poison()
        self._poison_port(reason)
        raise SessionError("load", f"the engine could not commit and is poisoned: {reason}")

    def _leave(self, reason: str) -> None:
        if self._state.describe().state == "poisoned":
            self._poison_port(reason)
            return
        try:
            self._ask_port("abort", self._port.abort)
        except SessionError as error:
            self._state.poison()
            self._poison_port(str(error))

    def _poison_port(self, reason: str) -> None:
        try:
            self._port.poison(reason)
        except Exception:  # noqa: BLE001 - the state machine refuses already; the failure that led here is the one to report
            return

    def _ask_port(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise SessionError("engine", f"the engine failed to {what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _first_state(description: PortDescription, stale: bool | None) -> EngineState:
    if description.version is None:
        return "poisoned"
    joins_later = description.epoch > 1 if stale is None else stale
    return "stale" if joins_later else "serving"


def _largest_frame(description: PortDescription) -> int:
    sizes = [tensor_nbytes(spec.dtype, tuple(spec.shape)) + ALIGNMENT for spec in description.expected_tensors]
    return sum(sizes) + MAX_HEADER_NBYTES + 2 * ALIGNMENT


def names_to_verify(sent: Manifest, verify: VerifyMode) -> list[str]:
    """The tensors an engine reads back before it commits: all, some matrices with all norms, or none."""
    names = [record.name for record in sent.tensors]
    if verify == "full":
        return names
    if verify == "off":
        return []
    others = [name for name in names if not _is_norm(name)]
    drawn = random.Random(sent.digest).sample(others, min(_PROBED, len(others)))
    return drawn + [name for name in names if _is_norm(name)]


def _is_norm(name: str) -> bool:
    return any("norm" in segment for segment in name.split("."))


def specs_of(description: PortDescription) -> list[Spec]:
    """The expected tensors as plain specs. Raises TensorError for a dtype that does not travel."""
    specs = [Spec(s.name, s.dtype, tuple(s.shape)) for s in description.expected_tensors]
    for spec in specs:
        tensor_nbytes(spec.dtype, spec.shape)
    return specs


def error_to_json(error: Exception) -> Mapping[str, Any]:
    """An error as the answer to a request."""
    code = getattr(error, "code", "internal")
    return {"code": code, "message": str(error), "names": list(getattr(error, "names", ()))}
