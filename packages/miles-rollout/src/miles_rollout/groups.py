"""Groups of trajectories of one prompt, and group v1, their form on wires and disk.

Group v1 is a safetensors file: the header's `__metadata__` has `format` = "miles.group/v1" and `group`, a JSON object
(`contracts/group/v1/schema.json`); tensor `member.<m>.trajectory.<t>` (U8, one dimension) holds the bytes of one
trajectory, which this package does not look into.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from miles_rollout.data.prompts import PromptKey
from miles_rollout.errors import GroupFormatError
from miles_rollout.protocols import Trajectory, TrajectoryCodec, TrajectoryStatus

GROUP_FORMAT = "miles.group/v1"
MAX_HEADER_BYTES = 64 * 1024**2
_STATUSES = frozenset(get_args(TrajectoryStatus))


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One execution of the agent: usually one trajectory, several when the session branched, none when it failed early.

    `reward` is raw and the same for all trajectories of the member; None only where the member is aborted.
    """

    trajectories: tuple[Trajectory, ...]
    status: TrajectoryStatus
    reward: float | None
    reason: str
    seed: int
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trajectory(self) -> Trajectory:
        """The only trajectory. Raises ValueError when there is none or more than one."""
        if len(self.trajectories) != 1:
            raise ValueError(f"this member has {len(self.trajectories)} trajectories, not one: look at `trajectories`")
        return self.trajectories[0]

    @property
    def aborted(self) -> bool:
        return self.status == "aborted" or any(part.status == "aborted" for part in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        return _oldest(part.oldest_version for part in self.trajectories)

    @property
    def n_tokens(self) -> int:
        return sum(part.n_tokens for part in self.trajectories)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All members of one drawn prompt. `group_id` is the draw order, `attempt` counts from 0 within the epoch."""

    prompt_id: str
    group_id: int
    epoch: int
    attempt: int
    members: tuple[Member, ...]

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.prompt_id, self.epoch)

    @property
    def aborted(self) -> bool:
        """Whether generation failed: any trajectory of any member was given up."""
        return any(member.aborted for member in self.members)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version of any sampled token of any member; None when no member knows its versions."""
        return _oldest(member.oldest_version for member in self.members)

    @property
    def rewards(self) -> list[float | None]:
        return [member.reward for member in self.members]

    @property
    def n_tokens(self) -> int:
        return sum(member.n_tokens for member in self.members)


def _oldest(versions: Iterator[int | None]) -> int | None:
    return min((version for version in versions if version is not None), default=None)


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member with its trajectories still as bytes."""

    trajectories: tuple[bytes, ...]
    status: TrajectoryStatus
    reward: float | None
    reason: str
    seed: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group read from bytes; `decode` turns its trajectories into objects."""

    prompt_id: str
    group_id: int
    epoch: int
    attempt: int
    members: tuple[MemberRecord, ...]

    def decode(self, codec: TrajectoryCodec) -> Group:
        members = tuple(_decode_member(member, codec) for member in self.members)
        return Group(self.prompt_id, self.group_id, self.epoch, self.attempt, members)


def _decode_member(record: MemberRecord, codec: TrajectoryCodec) -> Member:
    parts = tuple(codec.loads(data) for data in record.trajectories)
    return Member(parts, record.status, record.reward, record.reason, record.seed, record.metadata)


def dumps_group(group: Group, codec: TrajectoryCodec) -> bytes:
    """A group as group v1 bytes; the same group gives the same bytes.

    Raises:
        GroupFormatError: metadata is not JSON, or a reward is not finite.
    """
    header = {
        "prompt_id": group.prompt_id,
        "group_id": group.group_id,
        "epoch": group.epoch,
        "attempt": group.attempt,
        "members": [_member_header(member) for member in group.members],
    }
    try:
        text = json.dumps(header, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise GroupFormatError(f"group {group.group_id} (prompt {group.prompt_id!r}) is not JSON: {error}") from error
    bodies = {
        _tensor_name(m, t): codec.dumps(trajectory)
        for m, member in enumerate(group.members)
        for t, trajectory in enumerate(member.trajectories)
    }
    return _write_container(bodies, {"format": GROUP_FORMAT, "group": text})


def _write_container(bodies: Mapping[str, bytes], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file. The library's own writer puts metadata in an order that changes from call to call."""
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, body in bodies.items():
        header[name] = {"dtype": "U8", "shape": [len(body)], "data_offsets": [position, position + len(body)]}
        position += len(body)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *bodies.values()))


def _member_header(member: Member) -> dict[str, Any]:
    return {
        "trajectories": len(member.trajectories),
        "status": member.status,
        "reward": member.reward,
        "reason": member.reason,
        "seed": member.seed,
        "metadata": dict(member.metadata),
    }


def _tensor_name(member: int, trajectory: int) -> str:
    return f"member.{member}.trajectory.{trajectory}"


def loads_group(data: bytes | memoryview) -> GroupRecord:
    """Read group v1. Every size is checked against the bytes that are there before anything is copied.

    Raises:
        GroupFormatError: with what is wrong and where.
    """
    view = memoryview(data)
    entries, metadata, body = _read_container(view)
    if metadata.get("format") != GROUP_FORMAT:
        raise GroupFormatError(f"the format is {metadata.get('format')!r}, not {GROUP_FORMAT!r}")
    header = _object(_parse(metadata.get("group"), "the group"), "the group")
    names = iter(entries)
    members = tuple(
        _read_member(index, _object(raw, f"member {index}"), entries, body)
        for index, raw in enumerate(_list(header.get("members"), "members"))
    )
    expected = sum(len(member.trajectories) for member in members)
    if expected != len(entries):
        raise GroupFormatError(
            f"the members name {expected} trajectories and the file holds {len(entries)}: {[*names][:4]}"
        )
    return GroupRecord(
        prompt_id=_text(header, "prompt_id"),
        group_id=_integer(header, "group_id"),
        epoch=_integer(header, "epoch"),
        attempt=_integer(header, "attempt"),
        members=members,
    )


def _read_container(view: memoryview) -> tuple[dict[str, tuple[int, int]], Mapping[str, Any], memoryview]:
    if len(view) < 8:
        raise GroupFormatError(f"{len(view)} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", view[:8])
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise GroupFormatError(
            f"the header claims {length} bytes; {len(view) - 8} are there and {MAX_HEADER_BYTES} allowed"
        )
    header = _object(_parse(bytes(view[8 : 8 + length]), "the header"), "the header")
    metadata = _object(header.pop("__metadata__", None), "__metadata__")
    body = view[8 + length :]
    entries = {name: _extent(name, _object(entry, name)) for name, entry in header.items()}
    _check_extents(entries, len(body))
    return entries, metadata, body


def _extent(name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    offsets = _list(entry.get("data_offsets"), f"data_offsets of {name}")
    if len(offsets) != 2 or any(type(value) is not int or value < 0 for value in offsets):
        raise GroupFormatError(f"{name} has the offsets {offsets}")
    start, stop = offsets
    if entry.get("dtype") != "U8" or entry.get("shape") != [stop - start]:
        raise GroupFormatError(f"{name} is {entry.get('dtype')} {entry.get('shape')}, not U8 [{stop - start}]")
    return start, stop


def _check_extents(entries: Mapping[str, tuple[int, int]], size: int) -> None:
    position = 0
    for name, (start, stop) in sorted(entries.items(), key=lambda item: item[1]):
        if start != position or stop < start:
            raise GroupFormatError(f"{name} covers bytes {start} to {stop}; the next unread byte is {position}")
        position = stop
    if position != size:
        raise GroupFormatError(f"the trajectories cover {position} bytes and the file holds {size}")


def _read_member(
    index: int, raw: Mapping[str, Any], entries: Mapping[str, tuple[int, int]], body: memoryview
) -> MemberRecord:
    count = _integer(raw, "trajectories")
    if count > len(entries):
        raise GroupFormatError(f"member {index} claims {count} trajectories; the file holds {len(entries)}")
    status: Any = raw.get("status")
    reward = raw.get("reward")
    if status not in tuple(_STATUSES):  # a tuple compares what has no hash, too
        raise GroupFormatError(f"member {index} has the status {status!r:.60}, not one of {sorted(_STATUSES)}")
    if reward is not None and not _is_finite(reward):
        raise GroupFormatError(f"member {index} has the reward {reward!r:.60}")
    return MemberRecord(
        trajectories=tuple(_trajectory(index, part, entries, body) for part in range(count)),
        status=status,
        reward=None if reward is None else float(reward),
        reason=_text(raw, "reason"),
        seed=_integer(raw, "seed"),
        metadata=_object(raw.get("metadata"), f"metadata of member {index}"),
    )


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _trajectory(member: int, part: int, entries: Mapping[str, tuple[int, int]], body: memoryview) -> bytes:
    name = _tensor_name(member, part)
    if name not in entries:
        raise GroupFormatError(f"{name} is missing")
    start, stop = entries[name]
    return bytes(body[start:stop])


def _parse(text: Any, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise GroupFormatError(f"{what} is not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GroupFormatError(f"{what} is {type(value).__name__}, not an object")
    return value


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise GroupFormatError(f"{what} is {type(value).__name__}, not a list")
    return value


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < 0:
        raise GroupFormatError(f"{key} is {value!r}, not a count")
    return value


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise GroupFormatError(f"{key} is {value!r}, not text")
    return value
