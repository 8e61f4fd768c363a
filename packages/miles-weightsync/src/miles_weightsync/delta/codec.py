"""Two encodings of changed bytes, blind to dtype. Streams are as before compression.

xor        new ^ old, as long as the tensor; applied exactly once on the right base
overwrite  u32 count | count x u32 position, ascending | count new bytes; idempotent (little endian)
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from miles_weightsync.digest import digest_bytes
from miles_weightsync.errors import DeltaError

Encoding = Literal["xor", "overwrite"]
ENCODINGS = ("xor", "overwrite")

_U32 = np.dtype("<u4")
_POSITION_LIMIT = 2**32
_COUNT_NBYTES = 4
_ENTRY_NBYTES = 5

Bytes = NDArray[np.uint8]


def check_encodable(encoding: str, nbytes: int, changed: int) -> None:
    """Raise DeltaError (code `too_large`) when positions or their count need more than 32 bits."""
    if _known(encoding) == "overwrite" and (nbytes > _POSITION_LIMIT or changed >= _POSITION_LIMIT):
        raise DeltaError(
            "too_large", f"overwrite has 32-bit positions: {nbytes} bytes with {changed} changes do not fit, use xor"
        )


def encode_delta(old: bytes | memoryview, new: bytes | memoryview, encoding: str) -> bytes:
    """The stream that turns `old` into `new`. Raises DeltaError (codes `size`, `format`, `too_large`)."""
    before, after = _array(old), _array(new)
    if before.size != after.size:
        raise DeltaError("size", f"the tensor had {before.size} bytes and now has {after.size}: publish it whole")
    if _known(encoding) == "xor":
        return np.bitwise_xor(before, after).tobytes()
    positions = np.flatnonzero(before != after)
    check_encodable(encoding, before.size, positions.size)
    return _U32.type(positions.size).tobytes() + positions.astype(_U32).tobytes() + after[positions].tobytes()


def patch(old: bytes | memoryview, stream: bytes | memoryview, encoding: str) -> bytes:
    """Apply a stream without looking at the result. Raises DeltaError for a stream that does not fit the tensor."""
    before, delta = _array(old), _array(stream)
    if _known(encoding) == "xor":
        _check_length(delta.size, before.size)
        return np.bitwise_xor(before, delta).tobytes()
    return _overwrite(before, delta).tobytes()


def apply_delta(
    old: bytes | memoryview,
    stream: bytes | memoryview,
    encoding: str,
    digest: str,
    checksum: str = "xxh3-128",
) -> bytes:
    """The new bytes, which must have this digest. Raises DeltaError (code `checksum`) when they have another."""
    new = patch(old, stream, encoding)
    require_digest(new, digest, checksum)
    return new


def require_digest(data: bytes, digest: str, checksum: str = "xxh3-128") -> None:
    """Raise DeltaError (code `checksum`) unless `data` has this digest."""
    found = digest_bytes(data, checksum)
    if found != digest:
        raise DeltaError("checksum", f"the result has digest {found}, declared is {digest}: wrong base or damage")


def _overwrite(before: Bytes, delta: Bytes) -> Bytes:
    if delta.size < _COUNT_NBYTES:
        raise DeltaError("truncated", f"an overwrite stream of {delta.size} bytes has no count")
    count = int(delta[:_COUNT_NBYTES].view(_U32)[0])
    _check_length(delta.size, _COUNT_NBYTES + _ENTRY_NBYTES * count)
    end = _COUNT_NBYTES + 4 * count
    positions = delta[_COUNT_NBYTES:end].view(_U32).astype(np.int64)
    if np.any(np.diff(positions) <= 0):
        raise DeltaError("position_order", "positions of an overwrite stream must ascend strictly")
    if count and positions[-1] >= before.size:
        raise DeltaError("position", f"position {positions[-1]} lies beyond the tensor's {before.size} bytes")
    after = before.copy()
    after[positions] = delta[end:]
    return after


def _check_length(length: int, wanted: int) -> None:
    if length != wanted:
        code = "truncated" if length < wanted else "trailing"
        raise DeltaError(code, f"the stream has {length} bytes, {wanted} are needed")


def _known(encoding: str) -> str:
    if encoding not in ENCODINGS:
        raise DeltaError("format", f"delta encoding {encoding!r} is none of {' '.join(ENCODINGS)}")
    return encoding


def _array(data: bytes | memoryview) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)
