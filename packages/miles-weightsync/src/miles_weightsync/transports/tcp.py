"""Whole frames over the control connection of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

from miles_weightsync.fanout import fan_out
from miles_weightsync.frame import TRAILER_NBYTES, BucketHeader, frame_prefix, write_frame
from miles_weightsync.messages import TcpPayload
from miles_weightsync.outgoing import Named
from miles_weightsync.policy import Delivery
from miles_weightsync.sink import ReceiverSink
from miles_weightsync.transports.protocol import Results, StagedBucket


class TcpTransport:
    """Sends each engine its own copy of a frame."""

    delivery: Delivery = "p2p"

    def __init__(self) -> None:
        self._slots = [bytearray(), bytearray()]

    def open(self, slot_nbytes: int) -> None:
        """Have room for two frames."""
        if len(self._slots[0]) < slot_nbytes:
            self._slots = [bytearray(slot_nbytes), bytearray(slot_nbytes)]

    def stage(self, slot: int, header: BucketHeader, tensors: tuple[Named, ...]) -> StagedBucket:
        """Write the frame into a slot."""
        prefix = frame_prefix(header)
        nbytes = len(prefix) + header.payload_nbytes + TRAILER_NBYTES
        frame = memoryview(self._slots[slot])[:nbytes]
        return StagedBucket(header, tensors, write_frame(prefix, header, tensors, frame), frame)

    def connect(self, pool: Executor, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Nothing to prepare."""
        return dict.fromkeys(sinks, "apply")

    def deliver(self, pool: Executor, staged: StagedBucket, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Send the frame to all engines at once."""
        return fan_out(pool, sinks, lambda sink: send_frame(sink, staged.header.bucket, staged.digest, staged.place))

    def close(self) -> None:
        """Drop the buffers."""
        self._slots = [bytearray(), bytearray()]


def send_frame(sink: ReceiverSink, index: int, digest: str, frame: bytearray | memoryview) -> str:
    """Announce a frame, send it when the engine is ready, and return its answer."""
    if sink.announce_bucket(index, digest, TcpPayload(frame_nbytes=len(frame))) == "ignored":
        return "ignored"
    sink.send_bytes(frame)
    return sink.finish_bucket()
