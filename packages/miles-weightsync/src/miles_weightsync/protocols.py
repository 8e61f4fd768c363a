"""What miles-weightsync needs from outside: weights of a trainer, a port in each engine, number encoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

PauseMode = Literal["abort", "retract", "in_place"]


@runtime_checkable
class WireTensor(Protocol):
    """A tensor as bytes: safetensors dtype name, shape, row-major little-endian data."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> memoryview: ...


class TensorSpec(Protocol):
    """Name, safetensors dtype name and shape of a tensor an engine expects."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class PortDescription(Protocol):
    """An engine as the publisher sees it."""

    @property
    def engine_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    @property
    def expected_tensors(self) -> Sequence[TensorSpec]: ...

    @property
    def quant_config(self) -> Mapping[str, Any] | None: ...

    @property
    def parallelism(self) -> Mapping[str, int] | None: ...


@runtime_checkable
class WeightPort(Protocol):
    """An engine's weights, reached from inside its process. Thread-safe; each call returns when it is done."""

    def describe(self) -> PortDescription: ...

    def pause(self, mode: PauseMode) -> None: ...

    def flush(self) -> None: ...

    def begin(self, session: str, target_version: int) -> None: ...

    def load(self, tensors: Mapping[str, WireTensor]) -> None: ...

    def read(self, name: str) -> memoryview: ...

    def commit(self, version: int, digest: str) -> None: ...

    def abort(self) -> None: ...

    def resume(self) -> None: ...

    def poison(self, reason: str) -> None: ...


class WeightSource(Protocol):
    """The trainer's weights. Collectives inside `units` are the trainer's business; every rank calls it."""

    def units(self, rank: int) -> Iterable[Sequence[tuple[str, WireTensor]]]:
        """Lists of (Hugging Face name, tensor) that are gathered together on this source rank, in a fixed order."""
        ...


class Encoder(Protocol):
    """Turns a full-precision tensor into what the engine stores (miles-quant in the full stack)."""

    def encode(self, name: str, tensor: WireTensor) -> Mapping[str, WireTensor]: ...


class Meter(Protocol):
    """Receives counters and gauges. The default does nothing."""

    def count(self, name: str, value: float = 1.0) -> None: ...

    def gauge(self, name: str, value: float) -> None: ...
