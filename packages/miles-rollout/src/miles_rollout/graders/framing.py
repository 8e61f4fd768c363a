"""Messages between the pool and a grader process: a length (u32, little endian) and that many bytes of JSON."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")


def pack(message: Any) -> bytes:
    """One message. Raises TypeError or ValueError when it is not plain JSON data."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def read_message(stream: asyncio.StreamReader, max_bytes: int) -> Any:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the process ended.
        ValueError: the length is over `max_bytes`, or the bytes are not JSON.
    """
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes; {max_bytes} are allowed")
    return json.loads(await stream.readexactly(length))


def read_blocking(stream: BinaryIO) -> Any:
    """The next message, or None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    return json.loads(stream.read(length))
