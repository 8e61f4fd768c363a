"""Frames in shared memory: one copy in by the publisher, one copy out by each engine, whatever their number."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

from miles_weightsync.fanout import fan_out
from miles_weightsync.frame import TRAILER_NBYTES, BucketHeader, frame_prefix, write_frame
from miles_weightsync.messages import ShmPayload
from miles_weightsync.outgoing import Named
from miles_weightsync.policy import Delivery
from miles_weightsync.segments import Segment, sweep_abandoned
from miles_weightsync.sink import ReceiverSink
from miles_weightsync.transports.protocol import Results, StagedBucket


class ShmTransport:
    """Two segments, reused for the whole run and removed by `close`; those of dead publishers are swept when it opens.

    Engines must be on this host, run as this user, and look in the same folder.
    """

    delivery: Delivery = "p2p"

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._segments: list[Segment] = []

    def open(self, slot_nbytes: int) -> None:
        """Have two segments of this size. Raises TransportError when the folder has no room."""
        if self._segments and self._segments[0].nbytes >= slot_nbytes:
            return
        self.close()
        sweep_abandoned(self._directory)
        for _ in range(2):
            self._segments.append(Segment(slot_nbytes, self._directory))

    def stage(self, slot: int, header: BucketHeader, tensors: tuple[Named, ...]) -> StagedBucket:
        """Write the frame into a segment."""
        segment = self._segments[slot]
        prefix = frame_prefix(header)
        digest = write_frame(prefix, header, tensors, segment.view)
        nbytes = len(prefix) + header.payload_nbytes + TRAILER_NBYTES
        return StagedBucket(header, tensors, digest, ShmPayload(segment=segment.name, frame_nbytes=nbytes))

    def connect(self, pool: Executor, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Nothing to prepare."""
        return dict.fromkeys(sinks, "apply")

    def deliver(self, pool: Executor, staged: StagedBucket, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Name the segment to all engines at once."""
        index = staged.header.bucket
        return fan_out(pool, sinks, lambda sink: sink.send_bucket(index, staged.digest, staged.place))

    def close(self) -> None:
        """Remove the segments."""
        for segment in self._segments:
            segment.close()
        self._segments = []
