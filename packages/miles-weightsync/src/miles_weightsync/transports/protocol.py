"""The seam between the publisher and the ways buckets travel."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from miles_weightsync.errors import WeightSyncError
from miles_weightsync.frame import BucketHeader
from miles_weightsync.outgoing import Named
from miles_weightsync.policy import Delivery
from miles_weightsync.sink import ReceiverSink

Results = Mapping[str, str | WeightSyncError]
"""What became of a bucket at each engine: `apply`, `ignored`, or an error."""


@dataclass(frozen=True, slots=True)
class StagedBucket:
    """A bucket ready to leave. `place` is the transport's own: a frame, a segment, a buffer."""

    header: BucketHeader
    tensors: tuple[Named, ...]
    digest: str
    place: Any


class Transport(Protocol):
    """Two buckets live at a time: one is staged (slot 0 or 1) while the other is delivered."""

    @property
    def delivery(self) -> Delivery:
        """Whether engines are reached together or each on its own."""
        ...

    def open(self, slot_nbytes: int) -> None:
        """Have room for two frames of so many bytes. Called before each session."""
        ...

    def stage(self, slot: int, header: BucketHeader, tensors: tuple[Named, ...]) -> StagedBucket:
        """Copy a bucket into a slot and digest it."""
        ...

    def connect(self, pool: Executor, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Prepare the engines that will receive together; others need nothing."""
        ...

    def deliver(self, pool: Executor, staged: StagedBucket, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Send a staged bucket to engines and wait for their answers."""
        ...

    def close(self) -> None:
        """Give back buffers and segments."""
        ...
