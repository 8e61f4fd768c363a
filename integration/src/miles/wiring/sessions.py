"""miles-tito's session server behind miles-rollout's `SessionClient`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_rollout.protocols import SessionHandle, Trajectory
from miles_tito import SessionServerClient


class TitoSessions:
    """Creates, collects and deletes sessions of one server."""

    def __init__(self, client: SessionServerClient) -> None:
        self._client = client

    async def create(self, *, seed: int, sampling: Mapping[str, Any], metadata: Mapping[str, Any]) -> SessionHandle:
        """Open a session."""
        handle = await self._client.create(seed=seed, sampling=sampling, metadata=metadata)
        return SessionHandle(handle.session_id, handle.base_url)

    async def collect(self, session_id: str) -> Sequence[Trajectory]:
        """Its trajectories. Raises an `IdentityViolation` of miles-tito when one was found."""
        return await self._client.collect(session_id)

    async def delete(self, session_id: str) -> None:
        """Close it."""
        await self._client.delete(session_id)
