"""What miles-rollout needs from outside. Each is the smallest shape that serves; adapters are a few lines.

Shapes: Q query tokens, S key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

PauseMode = Literal["abort", "retract", "in_place"]
TrajectoryStatus = Literal["completed", "truncated", "aborted", "failed"]


@runtime_checkable
class Trajectory(Protocol):
    """One finished trajectory, opaque but for what the buffer and the graders need."""

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version that produced a sampled token; None when unknown (foreign items only)."""
        ...

    @property
    def status(self) -> TrajectoryStatus: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def reward(self) -> float | None: ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation, in OpenAI's form, for graders and tables."""
        ...

    def with_reward(self, reward: float) -> Trajectory:
        """Return a copy that carries `reward`."""
        ...


class TrajectoryCodec(Protocol):
    """Trajectories as bytes (trajectory v1 in the full stack)."""

    def dumps(self, trajectory: Trajectory) -> bytes: ...

    def loads(self, data: bytes) -> Trajectory: ...


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """A session that exists: agents talk OpenAI chat to `base_url` + "/v1"."""

    session_id: str
    base_url: str


class SessionClient(Protocol):
    """The session server as the worker sees it. `collect` returns one trajectory a path."""

    async def create(self, *, seed: int, sampling: Mapping[str, Any], metadata: Mapping[str, Any]) -> SessionHandle: ...

    async def collect(self, session_id: str) -> Sequence[Trajectory]: ...

    async def delete(self, session_id: str) -> None: ...


Agent = Callable[..., Awaitable[Mapping[str, Any] | None]]
"""`async run(base_url, prompt, request_kwargs, metadata) -> dict | None`: speaks OpenAI chat to a session URL."""


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """What a grader sees: plain data, so that it can travel to a process that may be killed."""

    prompt_id: str
    label: Any
    messages: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, Any]
    status: TrajectoryStatus


@dataclass(frozen=True, slots=True)
class Grade:
    """A raw reward and the reason for it (`ok`, or why it is what it is)."""

    reward: float
    reason: str = "ok"


class Grader(Protocol):
    """Gives a trajectory its raw reward. Normalisation is the trainer's."""

    async def grade(self, request: GradeRequest) -> Grade: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A rollout-visible tensor: Hugging Face name, safetensors dtype name (`BF16`, `F32`, …) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@runtime_checkable
class WireTensor(Protocol):
    """A tensor as bytes: row-major, little endian."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class PortDescription:
    """An engine as the weight publisher sees it. `version` is the last committed one, None once poisoned."""

    engine_id: str
    epoch: int
    version: int | None
    expected_tensors: tuple[TensorSpec, ...]
    quant_config: Mapping[str, Any] | None = None
    parallelism: Mapping[str, int] | None = None


@runtime_checkable
class WeightPort(Protocol):
    """The engine's weights, offered to a receiver in the engine process. Thread-safe; a call returns when it is done.

    No request sees a version between `begin` and `commit`: the engine generates only when it is not paused.
    """

    def describe(self) -> PortDescription: ...

    def pause(self, mode: PauseMode) -> None: ...

    def flush(self) -> None:
        """Drop cached prefixes. Raises when requests still hold them."""
        ...

    def begin(self, session: str, target_version: int) -> None: ...

    def load(self, tensors: Mapping[str, WireTensor]) -> None:
        """Store one load unit. Unknown names, dtypes and shapes are errors that name the tensor; nothing is stored."""
        ...

    def read(self, name: str) -> memoryview:
        """The bytes of a tensor as stored now."""
        ...

    def commit(self, version: int, digest: str) -> None:
        """Take the loaded weights as `version`, whose manifest digest is `digest`."""
        ...

    def abort(self) -> None:
        """Leave an open session before anything was loaded."""
        ...

    def resume(self) -> None: ...

    def poison(self, reason: str) -> None:
        """Refuse to generate until a full install has been committed."""
        ...


class WeightFormat(Protocol):
    """A number format the engine can hold linear weights in (miles-quant in the full stack)."""

    def suffixes(self) -> tuple[str, ...]:
        """Name suffixes of the wire tensors that make one linear weight, e.g. ("weight", "weight_scale_inv")."""
        ...

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The [out, in] matrix that the linear layer multiplies by."""
        ...


class Numerics(Protocol):
    """How a forward pass computes. The batch-invariant one makes a token's numbers independent of its neighbours."""

    def forward(self) -> AbstractContextManager[None]:
        """Entered around each forward of the model."""
        ...

    def attend(
        self,
        query_QHD: torch.Tensor,
        key_SGD: torch.Tensor,
        value_SGD: torch.Tensor,
        first_position: int,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of one sequence, [Q, H, D]: query i is at `first_position + i`, sees keys up to there."""
        ...


class Meter(Protocol):
    """Receives counters and gauges. The default does nothing."""

    def count(self, name: str, value: float = 1.0) -> None: ...

    def gauge(self, name: str, value: float) -> None: ...
