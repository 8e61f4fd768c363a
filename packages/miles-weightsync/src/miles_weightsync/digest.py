"""Digests of bytes: xxh3-128 by default, blake3 where storage is not trusted, adler32 for older delta streams."""

from __future__ import annotations

import zlib
from typing import Literal, get_args

import xxhash
from blake3 import blake3

from miles_weightsync.errors import DeltaError

DigestFormat = Literal["xxh3-128", "blake3", "adler32"]
DIGEST_FORMATS: tuple[str, ...] = get_args(DigestFormat)


def xxh3(data: bytes | memoryview) -> str:
    """32 lower-case hex digits of xxh3-128. Reads the memory in place."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_bytes(data: bytes | memoryview, digest_format: str = "xxh3-128") -> str:
    """Lower-case hex digest of `data`. Raises DeltaError (code `format`) for an unknown format."""
    if digest_format == "xxh3-128":
        return xxh3(data)
    if digest_format == "blake3":
        return str(blake3(data).hexdigest())
    if digest_format == "adler32":
        return f"{zlib.adler32(data):08x}"
    raise DeltaError("format", f"digest format {digest_format!r} is none of {' '.join(DIGEST_FORMATS)}")
