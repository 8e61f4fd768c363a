"""zstd with a ceiling on what may come out, so that a few bytes cannot fill the memory."""

from __future__ import annotations

import zstandard

from miles_weightsync.errors import DeltaError

_LEVEL = 1


def compress(data: bytes | memoryview) -> bytes:
    """One zstd frame, level 1. The compressed bytes are not part of any contract, only what they decompress to."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def decompress(frame: bytes, cap: int) -> bytes:
    """The content of one frame, at most `cap` bytes. Raises DeltaError (codes `output_cap`, `corrupt`)."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        declared = zstandard.frame_content_size(frame)
        if declared > cap:
            raise _over(cap)
        return decompressor.decompress(frame, max_output_size=max(cap, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        if _exceeds(decompressor, frame, cap):
            raise _over(cap) from None
        raise DeltaError("corrupt", f"damaged zstd frame: {error}") from None


def _exceeds(decompressor: zstandard.ZstdDecompressor, frame: bytes, cap: int) -> bool:
    try:
        return len(decompressor.stream_reader(frame).read(cap + 1)) > cap
    except zstandard.ZstdError:
        return False


def _over(cap: int) -> DeltaError:
    return DeltaError("output_cap", f"the frame holds more than the declared {cap} bytes")
