"""How an announced bucket's bytes reach this process: over the connection, from a shared segment, or by broadcast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from miles_weightsync.bucket import align
from miles_weightsync.channel import Channel
from miles_weightsync.deadline import Deadline
from miles_weightsync.digest import xxh3
from miles_weightsync.errors import FrameError, TransportError
from miles_weightsync.frame import PREFIX_NBYTES, Frame, header_from_json, header_length, parse_frame
from miles_weightsync.messages import GlooPayload, ShmPayload, TcpPayload
from miles_weightsync.segments import read_segment

Broadcast = Callable[[str, int], memoryview]
"""Receive `n` bytes from the source of the joined group of this name."""


def read_shm(payload: ShmPayload, directory: Path | None, limit: int) -> Frame:
    """A private copy of the frame in a segment, checked. Raises FrameError, TensorError, TransportError."""
    _check_limit(payload.frame_nbytes, limit)
    return parse_frame(read_segment(payload.segment, payload.frame_nbytes, directory))


def read_tcp(payload: TcpPayload, channel: Channel, limit: int, deadline: Deadline) -> Frame:
    """Ask for the frame and read it; its first bytes are judged before memory is taken for the rest.

    An error other than the payload's digest leaves bytes on the connection: the caller must close it.
    """
    _check_limit(payload.frame_nbytes, limit)
    channel.send({"ready": True}, deadline)
    prefix = bytearray(min(PREFIX_NBYTES, payload.frame_nbytes))
    channel.receive_into(memoryview(prefix), deadline)
    if align(PREFIX_NBYTES + header_length(bytes(prefix))) > payload.frame_nbytes:
        raise FrameError("truncated", "the frame's header is longer than the frame")
    frame = bytearray(payload.frame_nbytes)
    frame[: len(prefix)] = prefix
    channel.receive_into(memoryview(frame)[len(prefix) :], deadline)
    return parse_frame(frame)


def read_gloo(payload: GlooPayload, channel: Channel, broadcast: Broadcast, limit: int, deadline: Deadline) -> Frame:
    """Say that this member is ready, and take part in the broadcast once all are.

    Raises TransportError when the source calls the broadcast off.
    """
    header = header_from_json(payload.header)
    _check_limit(header.payload_nbytes, limit)
    channel.send({"ready": True}, deadline)
    answer = channel.receive(deadline, rest_s=deadline.remaining_s())
    if answer.get("go") is not True:
        raise TransportError("the source called the broadcast off: another member was not ready")
    data = broadcast(payload.group, header.payload_nbytes)
    return Frame(header, data, xxh3(data))


def _check_limit(nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise FrameError("out_of_range", f"a bucket of {nbytes} bytes; all tensors of this engine fit in {limit}")
