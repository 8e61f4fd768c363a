"""The bucket frame MWB1: a JSON header with a tensor table, then the flat payload, then its digest.

    magic "MWB1" | u32 little-endian header length | JSON header | zeros up to a multiple of 256 | payload | xxh3-128

The trailer holds the 16 digest bytes in the order of their hex text. Every limit is checked before memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from miles_weightsync import strict_json
from miles_weightsync.bucket import ALIGNMENT, align, layout
from miles_weightsync.digest import xxh3
from miles_weightsync.errors import FrameError, TensorError
from miles_weightsync.names import Phase, check_name
from miles_weightsync.protocols import WireTensor
from miles_weightsync.tensors import RawTensor, as_wire, item_nbytes, tensor_nbytes

MAGIC = b"MWB1"
PREFIX_NBYTES = 8
TRAILER_NBYTES = 16
MAX_HEADER_NBYTES = 64 * 1024 * 1024
MAX_DIMS = 8

Selector = Literal["target", "draft", "all"]


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A tensor of a bucket: `offset` counts bytes from the start of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """What a bucket is. Versions are decimal text; a bucket of a full install names its own version as base."""

    session: str
    version: str
    base_version: str
    bucket: int
    phase: Phase
    selector: Selector
    tensors: tuple[TableEntry, ...]
    payload_nbytes: int

    def to_json(self) -> dict[str, Any]:
        """The header as it is written."""
        return {
            "session": self.session,
            "version": self.version,
            "base_version": self.base_version,
            "bucket": self.bucket,
            "phase": self.phase,
            "selector": self.selector,
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "offset": t.offset, "nbytes": t.nbytes}
                for t in self.tensors
            ],
            "payload_nbytes": self.payload_nbytes,
        }


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed frame; `payload` is a view of the frame's memory."""

    header: BucketHeader
    payload: memoryview
    digest: str

    def tensors(self) -> dict[str, RawTensor]:
        """The tensors by name, as views of the payload."""
        return table_views(self.header, self.payload)


def make_table(tensors: Sequence[tuple[str, WireTensor]]) -> tuple[tuple[TableEntry, ...], int]:
    """A bucket's table and its payload's length in bytes. Raises TensorError for names or dtypes that do not travel."""
    raws = [(check_name(name), as_wire(tensor)) for name, tensor in tensors]
    offsets, total = layout([raw.nbytes for _, raw in raws])
    entries = (
        TableEntry(name, raw.dtype, raw.shape, offset, raw.nbytes)
        for (name, raw), offset in zip(raws, offsets, strict=True)
    )
    return tuple(entries), total


def write_payload(header: BucketHeader, tensors: Sequence[tuple[str, WireTensor]], target: memoryview) -> str:
    """Fill `target` (exactly `payload_nbytes` bytes) with tensors and zero gaps; return the xxh3-128 of the payload."""
    end = 0
    for entry, (_, tensor) in zip(header.tensors, tensors, strict=True):
        target[end : entry.offset] = bytes(entry.offset - end)
        end = entry.offset + entry.nbytes
        target[entry.offset : end] = as_wire(tensor).data
    return xxh3(target)


def frame_prefix(header: BucketHeader) -> bytes:
    """Everything before the payload: magic, length, JSON and padding. Raises FrameError (code `header_too_long`)."""
    text = strict_json.dumps(header.to_json())
    _check_header_length(len(text))
    prefix = MAGIC + struct.pack("<I", len(text)) + text
    return prefix + bytes(align(len(prefix)) - len(prefix))


def build_frame(header: BucketHeader, tensors: Sequence[tuple[str, WireTensor]]) -> bytearray:
    """A whole frame in memory."""
    prefix = frame_prefix(header)
    frame = bytearray(len(prefix) + header.payload_nbytes + TRAILER_NBYTES)
    write_frame(prefix, header, tensors, memoryview(frame))
    return frame


def write_frame(
    prefix: bytes, header: BucketHeader, tensors: Sequence[tuple[str, WireTensor]], target: memoryview
) -> str:
    """Write a frame to the start of `target`; return the digest of the payload."""
    start, end = len(prefix), len(prefix) + header.payload_nbytes
    target[:start] = prefix
    digest = write_payload(header, tensors, target[start:end])
    target[end : end + TRAILER_NBYTES] = bytes.fromhex(digest)
    return digest


def parse_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Check and read one whole frame. Raises FrameError or TensorError; the checks run in the order of the contract."""
    view = memoryview(data)
    length = header_length(bytes(view[:PREFIX_NBYTES]))
    start = align(PREFIX_NBYTES + length)
    if len(view) < start:
        raise FrameError("truncated", f"the frame ends in its header: {len(view)} of {start} bytes")
    fields = _header_fields(bytes(view[PREFIX_NBYTES : PREFIX_NBYTES + length]))
    if any(view[PREFIX_NBYTES + length : start]):
        raise FrameError("padding", "the bytes between header and payload are not zero")
    header = _checked_header(fields)
    _check_total(len(view), start + header.payload_nbytes + TRAILER_NBYTES)
    payload = view[start : start + header.payload_nbytes]
    digest = bytes(view[start + header.payload_nbytes :]).hex()
    if xxh3(payload) != digest:
        raise FrameError("digest", f"the payload of bucket {header.bucket} does not match its digest")
    return Frame(header, payload, digest)


def header_length(prefix: bytes) -> int:
    """The header's length from a frame's first 8 bytes.

    Raises FrameError (codes `magic`, `truncated`, `header_too_long`).
    """
    if not MAGIC.startswith(prefix[:4]):
        raise FrameError("magic", f"a bucket frame starts with {MAGIC!r}, not {prefix[:4]!r}")
    if len(prefix) < PREFIX_NBYTES:
        raise FrameError("truncated", f"the frame ends after {len(prefix)} bytes")
    length = int(struct.unpack("<I", prefix[4:])[0])
    _check_header_length(length)
    return length


def header_from_json(value: Any) -> BucketHeader:
    """Check and read a header that travels alone. Raises FrameError or TensorError."""
    return _checked_header(_check_fields(value))


def table_views(header: BucketHeader, payload: memoryview) -> dict[str, RawTensor]:
    """The tensors of a payload by name, as views of it."""
    return {t.name: RawTensor(t.dtype, t.shape, payload[t.offset : t.offset + t.nbytes]) for t in header.tensors}


def _check_header_length(length: int) -> None:
    if length > MAX_HEADER_NBYTES:
        raise FrameError("header_too_long", f"header of {length} bytes; the limit is {MAX_HEADER_NBYTES}")


def _check_total(length: int, wanted: int) -> None:
    if length != wanted:
        code = "truncated" if length < wanted else "trailing"
        raise FrameError(code, f"the frame has {length} bytes, its header announces {wanted}")


def _header_fields(text: bytes) -> Mapping[str, Any]:
    try:
        return _check_fields(strict_json.loads(text))
    except (strict_json.JsonSyntaxError, strict_json.RepeatedKeyError) as error:
        raise FrameError("header", f"the frame's header: {error}") from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit()


def _check_fields(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FrameError("header", "the frame's header is no JSON object")
    checks = {
        "session": isinstance(value.get("session"), str),
        "version": _is_version(value.get("version")),
        "base_version": _is_version(value.get("base_version")),
        "bucket": _is_count(value.get("bucket")),
        "phase": value.get("phase") in get_args(Phase),
        "selector": value.get("selector") in get_args(Selector),
        "payload_nbytes": _is_count(value.get("payload_nbytes")),
        "tensors": isinstance(value.get("tensors"), list),
    }
    for key, good in checks.items():
        if not good:
            raise FrameError("header", f"header field {key!r} is missing or not acceptable: {value.get(key)!r:.80}")
    for entry in value["tensors"]:
        _check_entry_fields(entry)
    return value


def _check_entry_fields(entry: Any) -> None:
    good = (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("shape"), list)
        and all(isinstance(dim, int) and not isinstance(dim, bool) for dim in entry["shape"])
        and all(isinstance(entry.get(key), int) and not isinstance(entry[key], bool) for key in ("offset", "nbytes"))
    )
    if not good:
        raise FrameError("header", f"a tensor entry lacks a field or has one of the wrong type: {entry!r:.80}")


def _checked_header(fields: Mapping[str, Any]) -> BucketHeader:
    entries = tuple(
        TableEntry(e["name"], e["dtype"], tuple(e["shape"]), e["offset"], e["nbytes"]) for e in fields["tensors"]
    )
    header = BucketHeader(
        session=fields["session"],
        version=fields["version"],
        base_version=fields["base_version"],
        bucket=fields["bucket"],
        phase=fields["phase"],
        selector=fields["selector"],
        tensors=entries,
        payload_nbytes=fields["payload_nbytes"],
    )
    _check_table(header)
    return header


def _check_table(header: BucketHeader) -> None:
    names: set[str] = set()
    start = end = 0
    for entry in header.tensors:
        _check_entry(entry, names)
        if entry.offset < start:
            raise FrameError("offset_order", f"{entry.name} starts at {entry.offset}, before the tensor above it")
        if entry.offset < end:
            raise FrameError("overlap", f"{entry.name} starts at {entry.offset}, inside the tensor above it")
        start, end = entry.offset, entry.offset + entry.nbytes
        if end > header.payload_nbytes:
            raise FrameError("out_of_range", f"{entry.name} ends at {end}, the payload at {header.payload_nbytes}")


def _check_entry(entry: TableEntry, names: set[str]) -> None:
    check_name(entry.name)
    if entry.name in names:
        raise TensorError("duplicate_name", f"{entry.name} appears twice in a bucket", [entry.name])
    names.add(entry.name)
    item_nbytes(entry.dtype)
    if len(entry.shape) > MAX_DIMS:
        raise FrameError("dims", f"{entry.name} has {len(entry.shape)} dimensions; the limit is {MAX_DIMS}")
    nbytes = tensor_nbytes(entry.dtype, entry.shape)
    if entry.offset < 0:
        raise FrameError("header", f"{entry.name} has offset {entry.offset}")
    if entry.nbytes != nbytes:
        raise TensorError("size", f"{entry.name} {entry.dtype} {entry.shape} has {nbytes} bytes, not {entry.nbytes}")
    if entry.offset % ALIGNMENT:
        raise FrameError("misaligned", f"{entry.name} starts at {entry.offset}, no multiple of {ALIGNMENT}")
