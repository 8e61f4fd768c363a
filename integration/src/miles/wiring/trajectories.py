"""miles-tito's trajectories as miles-rollout's opaque items."""

from __future__ import annotations

from typing import cast

from miles_rollout.protocols import Trajectory as Item
from miles_tito import Trajectory, codec


class TrajectoryBytes:
    """Trajectory v1 behind miles-rollout's `TrajectoryCodec`; the worker's items all come from miles-tito."""

    def dumps(self, trajectory: Item) -> bytes:
        """Trajectory v1 bytes."""
        return codec.dumps(cast(Trajectory, trajectory))

    def loads(self, data: bytes) -> Item:
        """The trajectory in the bytes. Raises `CodecError`."""
        return codec.loads(data)
