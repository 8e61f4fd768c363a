"""Deliberate faults, one or two for each identity: a drill for a user's own stack, and what sabotage tests switch on.

Each is injected at a seam, in the process that holds the data, after the checks that come before; so what finds it is
the check that comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from miles.config import FaultConfig
from miles.wiring.trajectories import TrajectoryBytes
from miles_rollout.protocols import PauseMode, PortDescription, TrajectoryCodec, WeightPort, WireTensor
from miles_rollout.protocols import Trajectory as Item
from miles_tito import Family, Session, SessionConfig, SessionStore, Trajectory, record_digest
from miles_tito.protocols import EngineInfo, GenerateReply, GenerateRequest, TokenEngine


class CorruptedStore(SessionStore):
    """The session server's store, which changes one buffer that holds a turn, as bad memory would."""

    def __init__(self, family: Family, config: SessionConfig, corrupt: Callable[[Session], None], after: int) -> None:
        super().__init__(family, config)
        self._corrupt = corrupt
        self._after = after
        self._seen = 0

    def get(self, session_id: str) -> Session:
        """The session; corrupted when its turn has come."""
        session = super().get(session_id)
        if session.turns:
            self._seen += 1
            if self._seen == self._after + 1:
                self._corrupt(session)
        return session


def flip_stored_token(session: Session) -> None:
    """Change the first id the policy sampled."""
    session.ids.view()[session.turns[0].turn.prompt_length] ^= 1


def swap_stored_experts(session: Session) -> None:
    """Swap two experts of the first routed row."""
    if session.expert_rows is not None:
        row = session.expert_rows.view()[0, 0]
        row[[0, 1]] = row[[1, 0]]


STORE_FAULTS: Mapping[str, Callable[[Session], None]] = {
    "flip_token": flip_stored_token,
    "swap_experts": swap_stored_experts,
}


def session_store(family: Family, config: SessionConfig, faults: Sequence[FaultConfig]) -> SessionStore:
    """The store of the session server, with the fault that concerns it."""
    for fault in faults:
        if fault.kind in STORE_FAULTS:
            return CorruptedStore(family, config, STORE_FAULTS[fault.kind], fault.after)
    return SessionStore(family, config)


class TamperedBytes(TrajectoryBytes):
    """Trajectories on their way to the trainer, of which one is changed after everything before has checked it."""

    def __init__(self, tamper: Callable[[Trajectory], Trajectory], after: int) -> None:
        self._tamper = tamper
        self._after = after
        self._seen = 0

    def dumps(self, trajectory: Item) -> bytes:
        """Trajectory v1 bytes, changed when its turn has come."""
        self._seen += 1
        if self._seen == self._after + 1:
            trajectory = self._tamper(cast(Trajectory, trajectory))
        return super().dumps(trajectory)


def flip_collected_token(trajectory: Trajectory) -> Trajectory:
    """Change the first id the policy sampled."""
    ids = trajectory.token_ids.copy()
    ids[trajectory.turns[0].prompt_length] ^= 1
    return replace(trajectory, token_ids=ids)


def swap_collected_experts(trajectory: Trajectory) -> Trajectory:
    """Swap two experts of the first routed row."""
    routes = trajectory.routed_experts
    if routes is None:
        return trajectory
    rows = routes.rows.copy()
    rows[0, 0, [0, 1]] = rows[0, 0, [1, 0]]
    return replace(trajectory, routed_experts=replace(routes, rows=rows))


TRANSIT_FAULTS: Mapping[str, Callable[[Trajectory], Trajectory]] = {
    "flip_token_in_transit": flip_collected_token,
    "swap_experts_in_transit": swap_collected_experts,
}


def trajectory_codec(faults: Sequence[FaultConfig]) -> TrajectoryCodec:
    """How the driver writes trajectories for the trainer, with the fault that concerns it."""
    for fault in faults:
        if fault.kind in TRANSIT_FAULTS:
            return TamperedBytes(TRANSIT_FAULTS[fault.kind], fault.after)
    return TrajectoryBytes()


class MislabellingEngine:
    """A `TokenEngine` that labels one reply a version too new and digests the record again, so that it agrees."""

    def __init__(self, engine: TokenEngine, after: int) -> None:
        self._engine = engine
        self._after = after
        self._seen = 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Generate; mislabel the reply when its turn has come."""
        reply = await self._engine.generate(request)
        self._seen += 1
        if self._seen != self._after + 1:
            return reply
        spans = tuple((start, version + 1) for start, version in reply.version_spans)
        digest = record_digest(request.input_ids, reply.output_ids, reply.logprobs, spans, reply.experts)
        return replace(reply, version_spans=spans, record_digest=digest)

    async def abort(self, request_id: str) -> None:
        """Pass on."""
        await self._engine.abort(request_id)

    async def describe(self) -> EngineInfo:
        """Pass on."""
        return await self._engine.describe()

    async def aclose(self) -> None:
        """Pass on."""
        await self._engine.aclose()


def faulty_engine(engine: TokenEngine, faults: Sequence[FaultConfig]) -> TokenEngine:
    """The session server's engine, with the fault that concerns it."""
    for fault in faults:
        if fault.kind == "shift_version":
            engine = MislabellingEngine(engine, fault.after)
    return engine


def faulty_port(port: WeightPort, faults: Sequence[FaultConfig]) -> WeightPort:
    """The port wrapped in the faults that concern an engine."""
    for fault in faults:
        port = BitFlippingPort(port, fault.after)
    return port


class BitFlippingPort:
    """A `WeightPort` that flips one stored bit after a load, as failing memory would."""

    def __init__(self, port: WeightPort, after: int) -> None:
        self._port = port
        self._after = after
        self._loads = 0

    def load(self, tensors: Mapping[str, WireTensor]) -> None:
        """Load; when its turn has come, store the first tensor again with one bit changed."""
        self._port.load(tensors)
        self._loads += 1
        if self._loads == self._after + 1:
            name, tensor = next(iter(tensors.items()))
            data = bytearray(tensor.data)
            data[len(data) // 2] ^= 1
            self._port.load({name: _Bytes(tensor.dtype, tensor.shape, memoryview(data))})

    def describe(self) -> PortDescription:
        """Pass on."""
        return self._port.describe()

    def pause(self, mode: PauseMode) -> None:
        """Pass on."""
        self._port.pause(mode)

    def flush(self) -> None:
        """Pass on."""
        self._port.flush()

    def begin(self, session: str, target_version: int) -> None:
        """Pass on."""
        self._port.begin(session, target_version)

    def read(self, name: str) -> memoryview:
        """Pass on."""
        return self._port.read(name)

    def commit(self, version: int, digest: str) -> None:
        """Pass on."""
        self._port.commit(version, digest)

    def abort(self) -> None:
        """Pass on."""
        self._port.abort()

    def resume(self) -> None:
        """Pass on."""
        self._port.resume()

    def poison(self, reason: str) -> None:
        """Pass on."""
        self._port.poison(reason)


class _Bytes:
    def __init__(self, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data


def drop_acknowledgement(
    keys: list[tuple[str, int]], faults: Sequence[FaultConfig], step: int
) -> list[tuple[str, int]]:
    """The prompts a trainer acknowledges; one is lost at step `after` when that fault is set."""
    lost = any(fault.kind == "drop_ledger_entry" and fault.after == step for fault in faults)
    return keys[1:] if lost else keys
