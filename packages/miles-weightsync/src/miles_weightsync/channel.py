"""One connection: length-prefixed JSON messages, raw bytes between them. No pickle; lengths are checked first."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any

from miles_weightsync import strict_json
from miles_weightsync.deadline import Deadline
from miles_weightsync.errors import ProtocolError, RpcTimeoutError, TransportError

_PREFIX = struct.Struct("<I")

MAX_MESSAGE_NBYTES = 64 * 1024 * 1024
"""Longest control message; a manifest of a hundred thousand tensors is far below."""


class Channel:
    """A connected stream socket. One thread at a time reads, one at a time writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        """Send one message. Raises TransportError, RpcTimeoutError."""
        text = strict_json.dumps(message)
        if len(text) > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"a control message of {len(text)} bytes is over the limit of {MAX_MESSAGE_NBYTES}")
        self.send_bytes(_PREFIX.pack(len(text)) + text, deadline)

    def receive(self, deadline: Deadline | None, *, rest_s: float, limit: int = MAX_MESSAGE_NBYTES) -> dict[str, Any]:
        """Receive one message: wait for its start until `deadline`, for the rest `rest_s` seconds.

        Raises ProtocolError, TransportError, RpcTimeoutError.
        """
        prefix = bytearray(_PREFIX.size)
        self.receive_into(memoryview(prefix)[:1], deadline)
        rest = Deadline(rest_s, "the rest of a message")
        self.receive_into(memoryview(prefix)[1:], rest)
        (length,) = _PREFIX.unpack(prefix)
        if length > limit:
            raise ProtocolError(f"a control message announces {length} bytes; the limit is {limit}")
        text = bytearray(length)
        self.receive_into(memoryview(text), rest)
        try:
            message = strict_json.loads(bytes(text))
        except ValueError as error:
            raise ProtocolError(f"a control message is {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError("a control message is no JSON object")
        return message

    def send_bytes(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Send raw bytes."""
        try:
            self._sock.settimeout(deadline.remaining_s())
            self._sock.sendall(data)
        except TimeoutError as error:
            raise _timeout(error, deadline) from None
        except OSError as error:
            raise TransportError(f"the connection broke while sending: {error}") from None

    def receive_into(self, target: memoryview, deadline: Deadline | None) -> None:
        """Fill `target` with raw bytes."""
        filled = 0
        while filled < len(target):
            try:
                self._sock.settimeout(deadline.remaining_s() if deadline else None)
                count = self._sock.recv_into(target[filled:])
            except TimeoutError as error:
                raise _timeout(error, deadline) from None
            except OSError as error:
                raise TransportError(f"the connection broke while receiving: {error}") from None
            if count == 0:
                raise TransportError("the other side closed the connection")
            filled += count

    def close(self) -> None:
        """Close; a thread waiting in `receive` wakes with TransportError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already disconnected
            pass
        finally:
            self._sock.close()


def _timeout(error: TimeoutError, deadline: Deadline | None) -> RpcTimeoutError:
    if isinstance(error, RpcTimeoutError) or deadline is None:
        return RpcTimeoutError(str(error))
    return deadline.error()
