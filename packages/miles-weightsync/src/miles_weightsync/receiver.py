"""The receiver: opens an engine's weights to a publisher on a loopback endpoint of its own, in the engine's process."""

from __future__ import annotations

import errno
import hmac
import itertools
import socket
import threading
from types import TracebackType
from typing import Any

from miles_weightsync import messages
from miles_weightsync.channel import Channel
from miles_weightsync.config import ReceiverConfig
from miles_weightsync.deadline import Deadline
from miles_weightsync.errors import (
    AddressInUseError,
    AuthError,
    FrameError,
    LockError,
    MissingExtraError,
    ProtocolError,
    RpcTimeoutError,
    SessionError,
    TensorError,
    TransportError,
    WeightIdentityError,
    WeightSyncError,
)
from miles_weightsync.frame import Frame
from miles_weightsync.guard import WeightGuard, error_to_json, specs_of
from miles_weightsync.manifest import manifest_from_json
from miles_weightsync.payloads import read_gloo, read_shm, read_tcp
from miles_weightsync.protocols import WeightPort
from miles_weightsync.segments import sweep_abandoned
from miles_weightsync.state import Session
from miles_weightsync.transports.member import GroupMember

_JOIN_S = 5.0


class EngineReceiver:
    """Serves one engine's `WeightPort` to publishers that know `token`.

    `port_number` 0 takes a free port; `address` is the real one. `stale` marks an engine that must get a full install
    before it serves; by default an engine process of a later epoch than the first. Use as a context manager, or call
    `start` and `close`.
    """

    def __init__(
        self,
        port: WeightPort,
        *,
        host: str = "127.0.0.1",
        port_number: int = 0,
        token: str,
        config: ReceiverConfig | None = None,
        stale: bool | None = None,
    ) -> None:
        self._config = config or ReceiverConfig()
        self._guard = WeightGuard(port, self._config, stale=stale)
        self._token = token
        self._bind_to = (host, port_number)
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._connections: dict[int, Channel] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._guarded = threading.Lock()
        self._numbers = itertools.count(1)
        self._own_threads: list[threading.Thread] = []

    @property
    def address(self) -> str:
        """`host:port` of the control endpoint."""
        if self._listener is None:
            raise RuntimeError("the receiver is not started")
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> EngineReceiver:
        """Listen. Raises AddressInUseError when the port is taken."""
        self._listener = _listen(*self._bind_to)
        for name, target in (("accept", self._accept), ("watch", self._watch)):
            thread = threading.Thread(target=target, name=f"weightsync-{name}", daemon=True)
            self._own_threads.append(thread)
            thread.start()
        return self

    def close(self) -> None:
        """Stop listening, drop all connections and wait for the threads."""
        self._closing.set()
        if self._listener is not None:
            _shut(self._listener)
        with self._guarded:
            channels, threads = list(self._connections.values()), list(self._threads.values())
        for channel in channels:
            channel.close()
        for thread in (*threads, *self._own_threads):
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def __enter__(self) -> EngineReceiver:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            self._serve(Channel(sock))

    def _serve(self, channel: Channel) -> None:
        number = next(self._numbers)
        connection = _Connection(channel, self._guard, self._config, self._token)
        with self._guarded:
            if self._closing.is_set() or len(self._connections) >= self._config.max_connections:
                channel.close()
                return
            thread = threading.Thread(target=self._run, args=(number, connection), name="weightsync-link", daemon=True)
            self._connections[number], self._threads[number] = channel, thread
        thread.start()

    def _run(self, number: int, connection: _Connection) -> None:
        try:
            connection.run()
        finally:
            with self._guarded:
                del self._connections[number], self._threads[number]

    def _watch(self) -> None:
        """End sessions whose publisher fell silent, and remove what it left in shared memory."""
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            expired, wait_s = self._guard.expire_idle()
            if expired:
                sweep_abandoned(self._config.shm_dir)


class _Connection:
    """One publisher's connection: read a request, answer it, until either side leaves."""

    def __init__(self, channel: Channel, guard: WeightGuard, config: ReceiverConfig, token: str) -> None:
        self._channel = channel
        self._guard = guard
        self._config = config
        self._token = token
        self._owner = ""
        self._lease_token: int | None = None
        self._member = GroupMember()

    def run(self) -> None:
        try:
            self._greet()
            while True:
                self._answer(self._channel.receive(None, rest_s=self._config.session_timeout_s))
        except (TransportError, ProtocolError, RpcTimeoutError, AuthError, FrameError):
            pass  # the connection is over; the other side was told where it could be
        finally:
            self._channel.close()
            self._member.leave()
            self._guard.disconnected(self._lease_token)

    def _greet(self) -> None:
        deadline = Deadline(self._config.hello_timeout_s, "hello")
        message = self._channel.receive(deadline, rest_s=self._config.hello_timeout_s, limit=messages.MAX_HELLO_NBYTES)
        try:
            self._check_hello(message)
        except WeightSyncError as error:
            self._reply({"ok": False, "error": error_to_json(error)})
            raise
        self._reply({"ok": True, "result": {"protocol": messages.PROTOCOL}})

    def _check_hello(self, message: dict[str, Any]) -> None:
        offered = message.get("token")
        known = hmac.compare_digest(str(offered).encode("utf-8", "surrogatepass"), self._token.encode())
        if message.get("op") != "hello" or not known:
            raise AuthError("the receiver does not know this token")
        request = messages.parse_request(message)
        assert isinstance(request, messages.Hello)
        self._owner = request.owner

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            result = self._handle(messages.parse_request(message))
        except (ProtocolError, FrameError) as error:  # what follows on the connection cannot be understood
            self._reply({"ok": False, "error": error_to_json(error)})
            raise
        except (SessionError, LockError, WeightIdentityError, TensorError, MissingExtraError) as error:
            self._reply({"ok": False, "error": error_to_json(error)})
        else:
            self._reply({"ok": True, "result": result})

    def _reply(self, message: dict[str, Any]) -> None:
        self._channel.send(message, Deadline(self._config.session_timeout_s, "answer"))

    def _handle(self, request: messages.Request) -> dict[str, Any]:
        match request:
            case messages.Describe():
                return self._describe()
            case messages.Acquire():
                self._lease_token = self._guard.acquire(self._owner)
                return {"token": self._lease_token}
            case messages.Bucket():
                return {"result": self._bucket(request)}
            case messages.Commit():
                return {"result": self._commit(request)}
            case messages.Digests():
                return {"digests": self._guard.digests()}
            case _:
                self._act(request)
                return {}

    def _act(self, request: messages.Request) -> None:
        """Requests whose answer is only that they were done."""
        match request:
            case messages.Release(token=token):
                self._guard.release(self._owner, token)
            case messages.Pause(mode=mode):
                self._guard.pause(mode)
            case messages.Flush():
                self._guard.flush()
            case messages.Begin(token=token, session=name, target=target, buckets=buckets, full=full):
                self._guard.begin(self._owner, Session(name, token, target, buckets, full))
            case messages.Abort(token=token, session=name):
                self._guard.abort(token, name)
            case messages.Resume():
                self._guard.resume()
            case messages.Poison(reason=reason):
                self._guard.poison(reason)
            case messages.Join():
                self._member.join(request)
            case messages.Leave():
                self._member.leave()
            case _:
                raise ProtocolError(f"{request.op} cannot come here")

    def _describe(self) -> dict[str, Any]:
        view, port = self._guard.describe()
        return {
            "engine_id": port.engine_id,
            "epoch": view.epoch,
            "version": view.version,
            "state": view.state,
            "routable": view.routable,
            "manifest": view.manifest,
            "target": view.target,
            "last_token": view.last_token,
            "quant_config": None if port.quant_config is None else dict(port.quant_config),
            "parallelism": None if port.parallelism is None else dict(port.parallelism),
            "expected_tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in specs_of(port)],
        }

    def _commit(self, request: messages.Commit) -> str:
        manifest = manifest_from_json(request.manifest)
        return self._guard.commit(
            self._owner, request.token, request.session, request.version, manifest, request.verify
        )

    def _bucket(self, request: messages.Bucket) -> str:
        ticket = (request.token, request.session, request.index, request.digest)
        if self._guard.admit(self._owner, *ticket) == "ignored":
            return "ignored"
        try:
            frame = self._receive(request)
        except FrameError as error:
            if error.code == "digest":
                raise self._guard.damaged(*ticket) from None
            raise
        except (TransportError, RpcTimeoutError) as error:
            raise SessionError(error.code, str(error)) from None
        finally:
            self._guard.arrived()
        return self._guard.apply(self._owner, *ticket, frame)

    def _receive(self, request: messages.Bucket) -> Frame:
        deadline = Deadline(self._config.session_timeout_s, f"bucket {request.index}")
        limit = self._guard.max_frame_nbytes
        match request.payload:
            case messages.TcpPayload() as payload:
                return read_tcp(payload, self._channel, limit, deadline)
            case messages.ShmPayload() as payload:
                return read_shm(payload, self._config.shm_dir, limit)
            case messages.GlooPayload() as payload:
                return read_gloo(payload, self._channel, self._member.receive, limit, deadline)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise AddressInUseError(f"{host}:{port} is in use: choose another port, or 0 for a free one") from None
    return sock


def _shut(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
    except OSError:  # some systems refuse this on a listener; closing is enough there
        pass
    finally:
        listener.close()
