"""Fakes for tests of this package and of those that use it: an engine's weights in memory, a source of arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_weightsync.protocols import PauseMode, WireTensor
from miles_weightsync.tensors import RawTensor, Spec, as_wire


@dataclass(frozen=True, slots=True)
class MemoryDescription:
    """What a MemoryPort says of itself."""

    engine_id: str
    epoch: int
    version: int | None
    expected_tensors: tuple[Spec, ...]
    quant_config: Mapping[str, Any] | None = None
    parallelism: Mapping[str, int] | None = None


@dataclass
class MemoryPort:
    """An engine that holds its weights as bytes and records every call in `calls`.

    `tensors` fixes names, dtypes and shapes; each starts as zeros (version 0). `fail` maps a call's name to an error
    that it raises; `tamper` sees a tensor's stored bytes after each load and may change them.
    """

    tensors: Mapping[str, WireTensor]
    engine_id: str = "engine-0:1"
    epoch: int = 1
    version: int | None = 0
    fail: dict[str, Exception] = field(default_factory=dict)
    tamper: Callable[[str, bytearray], None] | None = None
    calls: list[str] = field(default_factory=list)
    state: str = "serving"
    digest: str | None = None
    poisoned: threading.Event = field(default_factory=threading.Event)
    loads: int = 0

    def __post_init__(self) -> None:
        self._specs = {n: Spec(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()}
        self._stored = {name: bytearray(tensor.data.nbytes) for name, tensor in self.tensors.items()}

    def describe(self) -> MemoryDescription:
        """Not recorded in `calls`: anyone may ask at any time."""
        return MemoryDescription(self.engine_id, self.epoch, self.version, tuple(self._specs.values()))

    def pause(self, mode: PauseMode) -> None:
        """Stop serving."""
        self._call(f"pause {mode}")
        if self.state == "serving":
            self.state = "paused"

    def flush(self) -> None:
        """There is no cache."""
        self._call("flush")

    def begin(self, session: str, target_version: int) -> None:
        """Expect loads."""
        self._call("begin")

    def load(self, tensors: Mapping[str, WireTensor]) -> None:
        """Store a copy of each tensor. Raises KeyError or ValueError, with nothing stored, for what is not expected."""
        self._call("load")
        self.loads += 1
        for name, tensor in tensors.items():
            if Spec(name, tensor.dtype, tuple(tensor.shape)) != self._specs[name]:
                raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, expected {self._specs[name]}")
        for name, tensor in tensors.items():
            self._stored[name][:] = tensor.data
            if self.tamper is not None:
                self.tamper(name, self._stored[name])

    def read(self, name: str) -> memoryview:
        """The stored bytes."""
        return memoryview(self._stored[name]).toreadonly()

    def commit(self, version: int, digest: str) -> None:
        """Take the version."""
        self._call("commit")
        self.version, self.digest, self.state = version, digest, "paused"

    def abort(self) -> None:
        """Leave the session."""
        self._call("abort")

    def resume(self) -> None:
        """Serve."""
        self._call("resume")
        self.state = "serving"

    def poison(self, reason: str) -> None:
        """Refuse to serve."""
        self._call("poison")
        self.version, self.state = None, "poisoned"
        self.poisoned.set()

    def stored(self) -> dict[str, bytes]:
        """A copy of all stored bytes."""
        return {name: bytes(data) for name, data in self._stored.items()}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        error = self.fail.get(name.partition(" ")[0])
        if error is not None:
            raise error


@dataclass
class ArraySource:
    """A WeightSource over named arrays, numpy or torch, a few a unit. `passes` counts how often it was consumed."""

    arrays: Mapping[str, Any]
    per_unit: int = 1
    passes: int = 0

    def units(self, rank: int) -> Iterable[Sequence[tuple[str, RawTensor]]]:
        """The arrays in their order."""
        items = [(name, as_wire(array)) for name, array in self.arrays.items()]
        for start in range(0, len(items), self.per_unit):
            yield items[start : start + self.per_unit]
        self.passes += 1
