"""Calls between the driver and a role: one loopback TCP connection, a JSON header and raw buffers, never pickle.

Frame: `b"MRP1" | u32 header length | JSON header | buffers`, little endian; the header's `buffers` lists their sizes.
The first frame of a connection must carry the role's token, soon, and no buffers: nothing of a stranger's is kept.
Calls of a connection are answered in order, one at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.errors import RoleDiedError, RoleError

MAGIC = b"MRP1"
MAX_HEADER_BYTES = 16 << 20
MAX_BUFFER_BYTES = 8 << 30
MAX_HELLO_BYTES = 4096
HELLO_TIMEOUT_S = 5.0

Buffers = Sequence[bytes]
Handler = Callable[[Mapping[str, Any], Buffers], tuple[Mapping[str, Any], Buffers]]


class FrameError(ValueError):
    """Bytes that are not a frame of this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its buffers."""

    header: Mapping[str, Any]
    buffers: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """The frame as bytes."""
        header = json.dumps({**self.header, "buffers": [len(b) for b in self.buffers]}).encode()
        return b"".join([MAGIC, struct.pack("<I", len(header)), header, *self.buffers])


def parse_prefix(prefix: bytes, limit: int = MAX_HEADER_BYTES) -> int:
    """Header length of a frame that begins with these 8 bytes."""
    if prefix[:4] != MAGIC:
        raise FrameError(f"expected a frame of the role protocol, got {prefix[:4]!r}")
    (length,) = struct.unpack("<I", prefix[4:8])
    if length > limit:
        raise FrameError(f"a header of {length} bytes is over the limit of {limit}")
    return int(length)


def parse_header(data: bytes, limit: int = MAX_BUFFER_BYTES) -> tuple[dict[str, Any], list[int]]:
    """(header without sizes, buffer sizes); sizes are checked before anything is allocated."""
    try:
        header = json.loads(data)
        sizes = header.pop("buffers")
        valid = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FrameError(f"not a frame header: {error}") from error
    if not valid or sum(sizes) > limit:
        raise FrameError(f"buffers of {sizes!r:.100} bytes are outside the limit of {limit}")
    return header, sizes


def serve_calls(listener: socket.socket, token: str, handlers: Mapping[str, Handler]) -> None:
    """Answer calls on this thread until a `shutdown` call; a lost connection may be replaced by a new one."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                if _serve_connection(connection, token, handlers):
                    return
            except (OSError, FrameError):
                continue


def _serve_connection(connection: socket.socket, token: str, handlers: Mapping[str, Handler]) -> bool:
    if not _greeted(connection, token):
        connection.sendall(Frame({"error": {"code": "unauthorized", "message": "wrong token"}}).encode())
        return False
    connection.sendall(Frame({"result": {}}).encode())
    while True:
        call = _receive(connection)
        if call.header.get("call") == "shutdown":
            connection.sendall(Frame({"result": {}}).encode())
            return True
        connection.sendall(_answer(call, handlers).encode())


def _greeted(connection: socket.socket, token: str) -> bool:
    """Whether the first frame has the token. Calls wait behind a stranger no longer than `HELLO_TIMEOUT_S`."""
    deadline = time.monotonic() + HELLO_TIMEOUT_S
    length = parse_prefix(_exactly(connection, 8, deadline), MAX_HELLO_BYTES)
    header, _ = parse_header(_exactly(connection, length, deadline), 0)
    connection.settimeout(None)
    given = str(header.get("token", "")).encode("utf-8", "surrogatepass")
    return hmac.compare_digest(given, token.encode())


def _answer(call: Frame, handlers: Mapping[str, Handler]) -> Frame:
    name = str(call.header.get("call"))
    if name not in handlers:
        return Frame({"error": {"code": "unknown_call", "message": f"no call {name!r}; known: {sorted(handlers)}"}})
    try:
        result, buffers = handlers[name](call.header.get("arguments", {}), call.buffers)
    except Exception as error:  # noqa: BLE001  a role must answer; the driver decides what the error means
        return Frame({"error": {"code": getattr(error, "code", type(error).__name__), "message": str(error)}})
    return Frame({"result": dict(result)}, tuple(buffers))


def _receive(connection: socket.socket) -> Frame:
    header, sizes = parse_header(_exactly(connection, parse_prefix(_exactly(connection, 8))))
    return Frame(header, tuple(_exactly(connection, size) for size in sizes))


def _exactly(connection: socket.socket, n_bytes: int, deadline: float | None = None) -> bytes:
    data = bytearray(n_bytes)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        received = connection.recv_into(view)
        if received == 0:
            raise ConnectionResetError("the other side closed the connection")
        view = view[received:]
    return bytes(data)


class RoleClient:
    """The driver's end. Each call has a deadline; a role that misses it or hangs up is `RoleDiedError`."""

    def __init__(self, role: str, host: str, port: int, token: str) -> None:
        self.role = role
        self._address = (host, port)
        self._token = token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, buffers: Buffers = (), *, timeout_s: float
    ) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Call `name` and return (result, buffers). Raises `RoleError` with the role's code when the call failed."""
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_s):
                    reader, writer = await self._connected()
                    reply = await _exchange(
                        reader, writer, Frame({"call": name, "arguments": dict(arguments or {})}, tuple(buffers))
                    )
            except (OSError, asyncio.IncompleteReadError, FrameError) as error:
                await self.aclose()
                raise RoleDiedError(self.role, "role_died", _why(error, name, timeout_s)) from error
        return self._result(reply)

    async def aclose(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                self._result(await _exchange(reader, writer, Frame({"token": self._token})))
            except BaseException:
                writer.close()
                raise
            self._streams = (reader, writer)
        return self._streams

    def _result(self, reply: Frame) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        if "error" in reply.header:
            error = reply.header["error"]
            raise RoleError(self.role, str(error["code"]), str(error["message"]))
        return dict(reply.header["result"]), reply.buffers


def _why(error: Exception, name: str, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer to {name!r} within {timeout_s:g} s"
    return f"answered {name!r} with {error}" if isinstance(error, FrameError) else f"hung up in {name!r}"


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame: Frame) -> Frame:
    writer.write(frame.encode())
    await writer.drain()
    header, sizes = parse_header(await reader.readexactly(parse_prefix(await reader.readexactly(8))))
    return Frame(header, tuple([await reader.readexactly(size) for size in sizes]))
