"""Trajectory v1 as bytes: a safetensors file whose `__metadata__` carries the rest as JSON.

Layout: u64 header length, header JSON, tensor bytes. The header's `__metadata__` has `format`, `version` and
`trajectory` (JSON text, schema in `contracts/trajectory/v1/schema.json`). The reader is our own: every size is
checked against the bytes at hand before anything is allocated, and nothing in a file is ever executed.

A container holds several: magic, u32 header length, header JSON (`count`, `empty_reason`), then u64 length + bytes
for each.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CodecError, TrajectoryError
from .trajectory import RoutedExperts, Trajectory, Turn

FORMAT = "miles.trajectory"
VERSION = "1"
CONTAINER_MAGIC = b"MTC1"
MAX_HEADER_BYTES = 256 << 20
MAX_TRAJECTORIES = 65536
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TURN_ARRAYS = ("trimmed_ids", "trimmed_logprobs", "trimmed_expert_rows")
_MAIN_ARRAYS = {"token_ids": "I32", "loss_mask": "U8", "logprobs": "F32"}

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """The trajectories of one session, one a path. `empty_reason` is set when there are none."""

    trajectories: tuple[Trajectory, ...]
    empty_reason: str | None = None


def dumps(trajectory: Trajectory) -> bytes:
    """Serialise a valid trajectory. Raises `TrajectoryError` for an invalid one, `CodecError` for a value JSON cannot
    hold."""
    trajectory.validate()
    arrays = _arrays_of(trajectory)
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": VERSION, "trajectory": _json(_header_of(trajectory))}
    }
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    head = _json(header).encode("ascii")
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *(array.tobytes() for array in arrays.values())])


def loads(data: bytes | memoryview) -> Trajectory:
    """Inverse of `dumps`. Raises `CodecError` for anything that is not a trajectory v1, `TrajectoryError` for an
    invalid one."""
    header, body = _split(memoryview(data))
    meta = header.pop("__metadata__", None)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CodecError(f"not a trajectory: __metadata__.format must be {FORMAT!r}")
    if meta.get("version") != VERSION:
        raise CodecError(
            f"trajectory format version {meta.get('version')!r} is not known here; this reader knows {VERSION!r}"
        )
    arrays = _read_arrays(header, body)
    fields = _parse(meta.get("trajectory"), "__metadata__.trajectory")
    try:
        trajectory = _build(fields, arrays)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, TrajectoryError):
            raise
        raise CodecError(f"trajectory header: {type(error).__name__}: {error}") from error
    if arrays:
        raise CodecError(f"tensors {sorted(arrays)} belong to no field")
    trajectory.validate()
    return trajectory


def dumps_batch(batch: TrajectoryBatch) -> bytes:
    """Serialise the trajectories of a session into one container."""
    head = _json({"count": len(batch.trajectories), "empty_reason": batch.empty_reason}).encode("ascii")
    parts = [CONTAINER_MAGIC, struct.pack("<I", len(head)), head]
    for trajectory in batch.trajectories:
        body = dumps(trajectory)
        parts += [struct.pack("<Q", len(body)), body]
    return b"".join(parts)


def loads_batch(data: bytes) -> TrajectoryBatch:
    """Inverse of `dumps_batch`."""
    view = memoryview(data)
    if bytes(view[:4]) != CONTAINER_MAGIC:
        raise CodecError("not a trajectory container: wrong magic")
    (head_bytes,) = struct.unpack("<I", _take(view, 4, 4, "container header length"))
    head = _parse(bytes(_take(view, 8, head_bytes, "container header")), "container header")
    count, reason = head.get("count"), head.get("empty_reason")
    if type(count) is not int or not 0 <= count <= MAX_TRAJECTORIES or not (reason is None or isinstance(reason, str)):
        raise CodecError(f"container header {head} has no sensible count and empty_reason")
    offset, trajectories = 8 + head_bytes, []
    for _ in range(count):
        (length,) = struct.unpack("<Q", _take(view, offset, 8, "trajectory length"))
        trajectories.append(loads(_take(view, offset + 8, length, "trajectory")))
        offset += 8 + length
    if offset != len(view):
        raise CodecError(f"{len(view) - offset} bytes follow the last trajectory")
    return TrajectoryBatch(tuple(trajectories), reason)


def _take(view: memoryview, offset: int, length: int, what: str) -> memoryview:
    if offset + length > len(view):
        raise CodecError(f"{what} needs bytes [{offset}, {offset + length}) of {len(view)}: the data is cut")
    return view[offset : offset + length]


def _split(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    (length,) = struct.unpack("<Q", _take(view, 0, 8, "header length"))
    if length > MAX_HEADER_BYTES:
        raise CodecError(f"header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return _parse(bytes(_take(view, 8, length, "header")), "header"), view[8 + length :]


def _parse(text: Any, what: str) -> dict[str, Any]:
    if not isinstance(text, str | bytes):
        raise CodecError(f"{what} is missing")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{what} is not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise CodecError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"a trajectory holds a value that JSON cannot: {error}") from error


def _read_arrays(header: Mapping[str, Any], body: memoryview) -> Arrays:
    """Tensors of a safetensors header, which must cover the body without gap or overlap."""
    arrays: Arrays = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(*item)):
        start, stop = _offsets(name, entry)
        dtype, shape = _DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
        if dtype is None or not _is_shape(shape):
            raise CodecError(f"tensor {name!r} has dtype {entry.get('dtype')!r} and shape {shape!r}")
        count = 1
        for axis in shape:
            count *= axis
        if start != end or stop - start != count * dtype.itemsize or stop > len(body):
            raise CodecError(
                f"tensor {name!r} of shape {shape} takes bytes [{start}, {stop}) of {len(body)}; expected "
                f"{count * dtype.itemsize} "
                f"bytes from {end}"
            )
        arrays[name] = np.frombuffer(body, dtype, count, start).reshape(shape) if count else np.zeros(shape, dtype)
        end = stop
    if end != len(body):
        raise CodecError(f"{len(body) - end} bytes belong to no tensor")
    return arrays


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int and o >= 0 for o in offsets)):
        raise CodecError(f"tensor {name!r} has no valid data_offsets: {entry!r}")
    return offsets[0], offsets[1]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= 4 and all(type(axis) is int and axis >= 0 for axis in shape)


def _arrays_of(trajectory: Trajectory) -> Arrays:
    arrays: Arrays = {name: np.ascontiguousarray(getattr(trajectory, name)) for name in _MAIN_ARRAYS}
    if trajectory.routed_experts is not None:
        arrays["routed_experts"] = np.ascontiguousarray(trajectory.routed_experts.rows)
    for index, turn in enumerate(trajectory.turns):
        if turn.trimmed_ids:
            arrays[f"turns.{index}.trimmed_ids"] = np.asarray(turn.trimmed_ids, np.int32)
            arrays[f"turns.{index}.trimmed_logprobs"] = np.asarray(turn.trimmed_logprobs, np.float32)
        if turn.trimmed_expert_rows is not None:
            arrays[f"turns.{index}.trimmed_expert_rows"] = np.ascontiguousarray(turn.trimmed_expert_rows)
    return arrays


def _header_of(trajectory: Trajectory) -> dict[str, Any]:
    experts = trajectory.routed_experts
    skipped = (*_MAIN_ARRAYS, "turns", "routed_experts")
    header = {name: getattr(trajectory, name) for name in trajectory.__slots__ if name not in skipped}
    header["turns"] = [_turn_header(turn) for turn in trajectory.turns]
    header["routed_experts"] = experts and {
        name: getattr(experts, name) for name in experts.__slots__ if name != "rows"
    }
    return header


def _turn_header(turn: Turn) -> dict[str, Any]:
    return {name: value for name, value in asdict(turn).items() if name not in _TURN_ARRAYS}


def _build(fields: dict[str, Any], arrays: Arrays) -> Trajectory:
    main: dict[str, Any] = {name: _pop(arrays, name, dtype) for name, dtype in _MAIN_ARRAYS.items()}
    experts = fields.pop("routed_experts")
    turns = tuple(_build_turn(index, turn, arrays) for index, turn in enumerate(fields.pop("turns")))
    tools = fields.pop("tools")
    return Trajectory(
        **main,
        turns=turns,
        routed_experts=None if experts is None else _build_experts(experts, arrays),
        weight_version_spans=_spans(fields.pop("weight_version_spans")),
        messages=tuple(fields.pop("messages")),
        tools=None if tools is None else tuple(tools),
        **fields,
    )


def _build_turn(index: int, fields: dict[str, Any], arrays: Arrays) -> Turn:
    empty = np.zeros(0, np.float32)
    ids = arrays.pop(f"turns.{index}.trimmed_ids", np.zeros(0, np.int32))
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise CodecError(f"turns.{index}.trimmed_ids is {ids.dtype}{list(ids.shape)}, expected int32 of one axis")
    return Turn(
        version_spans=_spans(fields.pop("version_spans")),
        expert_version_spans=_spans(fields.pop("expert_version_spans")),
        trimmed_ids=tuple(ids.tolist()),
        trimmed_logprobs=arrays.pop(f"turns.{index}.trimmed_logprobs", empty),
        trimmed_expert_rows=arrays.pop(f"turns.{index}.trimmed_expert_rows", None),
        **fields,
    )


def _build_experts(fields: dict[str, Any], arrays: Arrays) -> RoutedExperts:
    return RoutedExperts(
        rows=arrays.pop("routed_experts"),
        layers=tuple(fields.pop("layers")),
        missing_spans=_spans(fields.pop("missing_spans")),
        version_spans=_spans(fields.pop("version_spans")),
        **fields,
    )


def _pop(arrays: Arrays, name: str, dtype: str) -> NDArray[Any]:
    array = arrays.pop(name)
    if array.dtype != _DTYPES[dtype]:
        raise CodecError(f"tensor {name!r} is {array.dtype}, expected {dtype}")
    return array


def _spans(pairs: Any) -> tuple[tuple[int, int], ...]:
    spans = tuple(tuple(pair) for pair in pairs)
    if not all(len(span) == 2 and all(type(part) is int for part in span) for span in spans):
        raise CodecError(f"spans must be pairs of integers: {pairs!r}")
    return spans
