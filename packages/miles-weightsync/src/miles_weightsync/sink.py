"""The publisher's end of one engine: the remote form of `WeightPort`."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles_weightsync import messages
from miles_weightsync.channel import Channel
from miles_weightsync.config import VerifyMode
from miles_weightsync.deadline import Deadline
from miles_weightsync.errors import (
    AuthError,
    EngineUnreachableError,
    FrameError,
    LockError,
    ProtocolError,
    SessionError,
    TransportError,
    WeightIdentityError,
    WeightSyncError,
)
from miles_weightsync.manifest import Manifest, manifest_to_json
from miles_weightsync.protocols import PauseMode
from miles_weightsync.state import EngineState
from miles_weightsync.tensors import Spec

Answer = Literal["apply", "ignored"]


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """An engine as its receiver describes it. `manifest` is the digest of the committed version."""

    engine_id: str
    epoch: int
    version: int | None
    state: EngineState
    routable: bool
    manifest: str | None
    target: int | None
    last_token: int
    expected_tensors: tuple[Spec, ...]
    quant_config: Mapping[str, Any] | None
    parallelism: Mapping[str, int] | None


class ReceiverSink:
    """Client of one `EngineReceiver`. Calls wait at most `timeout_s` seconds for their answer.

    Connects on first use. Calls raise what the engine answered (SessionError, LockError, WeightIdentityError,
    AuthError), EngineUnreachableError, or TransportError and RpcTimeoutError when the answer did not come; after these
    two the next call connects anew. Use as a context manager, or call `close`. Thread-safe; one call at a time.
    """

    def __init__(self, address: str, token: str, *, timeout_s: float = 120.0, connect_timeout_s: float = 5.0) -> None:
        self.address = address
        self._endpoint = _endpoint(address)
        self._token = token
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._owner = f"publisher-{uuid.uuid4().hex[:12]}"
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._fence: int | None = None
        self._session = ""
        self.generation = 0
        """Counts connections: whatever the receiver keeps for a connection ends with it."""

    def connect(self) -> None:
        """Connect anew and show the token. Raises EngineUnreachableError, AuthError."""
        with self._lock:
            self.close()
            try:
                sock = socket.create_connection(self._endpoint, timeout=self._connect_timeout_s)
            except OSError as error:
                raise EngineUnreachableError(f"no receiver answers at {self.address}: {error}") from None
            self._channel = Channel(sock)
            self.generation += 1
            try:
                self._call(messages.Hello(token=self._token, owner=self._owner))
            except WeightSyncError:
                self.close()
                raise

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def __enter__(self) -> ReceiverSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> RemoteDescription:
        """State, version, manifest digest and expected tensors."""
        result = self._call(messages.Describe())
        try:
            result["expected_tensors"] = tuple(Spec(n, d, tuple(s)) for n, d, s in result["expected_tensors"])
            return RemoteDescription(**result)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"{self.address} describes itself in a way this version does not know: {error}"
            ) from None

    def acquire(self) -> int:
        """Take the engine's update lock. Raises LockError (code `locked`)."""
        self._fence = int(self._call(messages.Acquire())["token"])
        return self._fence

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._fence is not None:
            fence, self._fence = self._fence, None
            self._call(messages.Release(token=fence))

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; returns when the engine has stopped."""
        self._call(messages.Pause(mode=mode))

    def flush(self) -> None:
        """Drop cached prefixes."""
        self._call(messages.Flush())

    def begin(self, session: str, target: int, *, buckets: int, full: bool = True) -> None:
        """Open a session of so many buckets. Needs `acquire`."""
        self._call(messages.Begin(token=self._token_held(), session=session, target=target, buckets=buckets, full=full))
        self._session = session

    def send_bucket(self, index: int, digest: str, payload: messages.ShmPayload) -> Answer:
        """Hand over a bucket that lies in shared memory."""
        return _answer(self._call(self._ticket(index, digest, payload)))

    def announce_bucket(
        self, index: int, digest: str, payload: messages.TcpPayload | messages.GlooPayload
    ) -> Literal["ready", "ignored"]:
        """Announce a bucket; on `ready` its bytes must follow, then `finish_bucket`."""
        result = self._call(self._ticket(index, digest, payload))
        return "ready" if result.get("ready") else "ignored"

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """The bytes of an announced bucket."""
        with self._lock:
            try:
                self._open().send_bytes(memoryview(data), self._deadline("bucket"))
            except WeightSyncError:
                self.close()
                raise

    def proceed(self, *, go: bool) -> None:
        """Tell a member that is ready for a broadcast whether it comes."""
        with self._lock:
            self._exchange({"go": go}, "broadcast", wait=False)

    def finish_bucket(self) -> Answer:
        """The answer to an announced bucket."""
        with self._lock:
            return _answer(self._exchange(None, "bucket"))

    def join(self, *, group: str, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join a broadcast group."""
        self._call(
            messages.Join(group=group, host=host, port=port, rank=rank, world_size=world_size, timeout_s=timeout_s)
        )

    def leave(self) -> None:
        """Leave the broadcast group."""
        self._call(messages.Leave())

    def commit(self, version: int, manifest: Manifest, verify: VerifyMode) -> Answer:
        """Verify and take the version. Raises WeightIdentityError."""
        request = messages.Commit(
            token=self._token_held(),
            session=self._session,
            version=version,
            manifest=manifest_to_json(manifest),
            verify=verify,
        )
        return _answer(self._call(request))

    def abort(self) -> None:
        """End the session."""
        self._call(messages.Abort(token=self._token_held(), session=self._session))

    def resume(self) -> None:
        """Generate again."""
        self._call(messages.Resume())

    def digests(self) -> dict[str, str]:
        """The digest of every tensor as stored now."""
        return dict(self._call(messages.Digests())["digests"])

    def poison(self, reason: str) -> None:
        """Take the engine out of service until a full install."""
        self._call(messages.Poison(reason=reason))

    def _ticket(self, index: int, digest: str, payload: messages.Payload) -> messages.Bucket:
        return messages.Bucket(
            token=self._token_held(), session=self._session, index=index, digest=digest, payload=payload
        )

    def _token_held(self) -> int:
        if self._fence is None:
            raise LockError("fenced", f"the update lock of {self.address} is not held: call acquire first")
        return self._fence

    def _call(self, request: messages.Request) -> dict[str, Any]:
        with self._lock:
            return self._exchange(request.model_dump(), request.op)

    def _exchange(self, message: Mapping[str, Any] | None, what: str, *, wait: bool = True) -> dict[str, Any]:
        """Send a message if there is one, and receive the answer."""
        channel, deadline = self._open(), self._deadline(what)
        try:
            if message is not None:
                channel.send(message, deadline)
            if not wait:
                return {}
            answer = channel.receive(deadline, rest_s=self._timeout_s)
        except WeightSyncError:
            self.close()
            raise
        if answer.get("ready") is True:
            return answer
        if answer.get("ok") is True and isinstance(answer.get("result"), dict):
            return dict(answer["result"])
        raise self._error(answer.get("error"))

    def _open(self) -> Channel:
        if self._channel is None:
            self.connect()
        if self._channel is None:
            raise TransportError(f"the connection to {self.address} was closed")
        return self._channel

    def _deadline(self, what: str) -> Deadline:
        return Deadline(self._timeout_s, f"{what} at {self.address}")

    def _error(self, error: Any) -> WeightSyncError:
        if not isinstance(error, dict):
            return ProtocolError(f"{self.address} answered neither a result nor an error")
        code, names = str(error.get("code")), [str(name) for name in error.get("names") or ()]
        message = f"{self.address}: {error.get('message')}"
        return _error_of(code, message, names, self.address)


def _error_of(code: str, message: str, names: list[str], engine: str) -> WeightSyncError:
    if code == "weight_identity":
        return WeightIdentityError(message, names, engine)
    if code == "unauthorized":
        return AuthError(message)
    if code == "locked":
        return LockError(code, message)
    if code in ("magic", "header_too_long", "truncated", "trailing", "header", "padding", "out_of_range"):
        return FrameError(code, message, names)
    return SessionError(code, message, names)


def _answer(result: Mapping[str, Any]) -> Answer:
    return "ignored" if result.get("result") == "ignored" else "apply"


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)
