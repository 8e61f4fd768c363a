"""Deliberate faults, one for each identity: a drill for a user's own stack, and what sabotage tests switch on.

Each fault is injected at a seam, in the process that owns the data, after that process's own checks have passed, so
that only the identity's check on the other side can find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from miles.config import FaultConfig
from miles_rollout.protocols import PauseMode, PortDescription, WeightPort, WireTensor
from miles_tito import record_digest
from miles_tito.protocols import EngineInfo, GenerateReply, GenerateRequest, TokenEngine

Tamper = Callable[[GenerateRequest, GenerateReply], GenerateReply]


class TamperingEngine:
    """A `TokenEngine` that changes one reply after its digest was checked, as bad memory would."""

    def __init__(self, engine: TokenEngine, tamper: Tamper, after: int) -> None:
        self._engine = engine
        self._tamper = tamper
        self._after = after
        self._seen = 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Generate; tamper with the reply when its turn has come."""
        reply = await self._engine.generate(request)
        self._seen += 1
        return self._tamper(request, reply) if self._seen == self._after + 1 else reply

    async def abort(self, request_id: str) -> None:
        """Pass on."""
        await self._engine.abort(request_id)

    async def describe(self) -> EngineInfo:
        """Pass on."""
        return await self._engine.describe()

    async def aclose(self) -> None:
        """Pass on."""
        await self._engine.aclose()


def flip_token(request: GenerateRequest, reply: GenerateReply) -> GenerateReply:
    """Change the first sampled id by one."""
    return replace(reply, output_ids=(reply.output_ids[0] ^ 1, *reply.output_ids[1:]))


def swap_experts(request: GenerateRequest, reply: GenerateReply) -> GenerateReply:
    """Swap two experts of the first routed row."""
    if reply.experts is None:
        return reply
    rows = reply.experts.rows.copy()
    rows[0, 0, [0, 1]] = rows[0, 0, [1, 0]]
    return replace(reply, experts=replace(reply.experts, rows=rows))


def shift_version(request: GenerateRequest, reply: GenerateReply) -> GenerateReply:
    """Label every token one version too new and digest the record again, as an engine that mislabels would."""
    spans = tuple((start, version + 1) for start, version in reply.version_spans)
    digest = record_digest(request.input_ids, reply.output_ids, reply.logprobs, spans, reply.experts)
    return replace(reply, version_spans=spans, record_digest=digest)


TAMPERS: Mapping[str, Tamper] = {
    "flip_token": flip_token,
    "swap_experts": swap_experts,
    "shift_version": shift_version,
}


def faulty_engine(engine: TokenEngine, faults: Sequence[FaultConfig]) -> TokenEngine:
    """The engine wrapped in the faults that concern the session server."""
    for fault in faults:
        engine = TamperingEngine(engine, TAMPERS[fault.kind], fault.after)
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
