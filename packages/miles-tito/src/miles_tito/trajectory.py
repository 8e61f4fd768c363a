"""Trajectory v1: one linear path of tokens, and where each of them came from.

Shapes: T tokens, N output tokens of a turn, R expert rows, L routed (MoE) layers (not all layers), K experts a token.
Row r of the experts holds the routes of the pass that consumed token r and predicted token r + 1, so there are at most
T - 1 rows. Spans are (start, version) unless they are (start, count), which the name then says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import TrajectoryError
from .protocols import FinishKind, Span

Status = Literal["completed", "truncated", "aborted", "failed"]
STATUSES: tuple[Status, ...] = ("completed", "truncated", "aborted", "failed")
FINISH_KINDS: tuple[FinishKind, ...] = ("stop", "length", "abort")
NOT_SAMPLED = -1
"""The version of a token that no policy sampled."""

ExpertArray = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.int32]


def expert_dtype(num_experts: int) -> np.dtype[Any]:
    """Smallest dtype that holds the expert indices 0 … `num_experts` - 1."""
    if num_experts <= 256:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if num_experts <= 65536 else np.dtype(np.int32)


def span_values(spans: Sequence[Span], length: int) -> NDArray[np.int64]:
    """Spread (start, version) spans over `length` places: int64 [length], -1 before the first start."""
    values = np.full(length, NOT_SAMPLED, dtype=np.int64)
    for start, version in spans:
        values[start:] = version
    return values


def spans_of(values: NDArray[np.int64]) -> tuple[Span, ...]:
    """Inverse of `span_values`: one span for each run of equal values."""
    if not len(values):
        return ()
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    return tuple((int(start), int(values[start])) for start in starts)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Routes of the tokens: `rows` [R, L, K] in the dtype of `expert_dtype(num_experts)`.

    `missing_spans` are (start, count) on the axis of the T - 1 possible rows; R plus the missing ones is T - 1.
    `version_spans` are (start, version) on the same axis. `layers` are the global indices of the L routed layers.
    """

    rows: ExpertArray
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    missing_spans: tuple[tuple[int, int], ...] = ()
    version_spans: tuple[Span, ...] = ()

    def present(self, length: int) -> NDArray[np.bool_]:
        """Which of `length` possible rows are held: bool [length]."""
        held = np.ones(length, dtype=np.bool_)
        for start, count in self.missing_spans:
            held[start : start + count] = False
        return held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutedExperts) and _same_fields(self, other)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One generation. The engine's input was `token_ids[:prompt_length]`, its output the next `completion_length` ids.

    `trimmed_ids` (int32), `trimmed_logprobs` (float32) and `trimmed_expert_rows` ([r, L, K]) are what the engine
    sampled after those and is not part of the trajectory (a boundary id that a splice replaced, a cut at a length
    limit): the record digest covers it. `version_spans` count the output from 0, trimmed ids included;
    `expert_version_spans` count the rows of the reply from 0, the first of which is row `expert_row_start` of the
    trajectory.
    """

    prompt_length: int
    completion_length: int
    finish_reason: FinishKind
    cached_tokens: int
    version_start: int
    version_end: int
    version_spans: tuple[Span, ...]
    record_digest: str
    engine_id: str
    started_s: float
    ended_s: float
    expert_digest: str | None = None
    expert_row_start: int = 0
    expert_version_spans: tuple[Span, ...] = ()
    trimmed_ids: tuple[int, ...] = ()
    trimmed_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    trimmed_expert_rows: ExpertArray | None = None

    @property
    def end(self) -> int:
        """Index after the last kept output token."""
        return self.prompt_length + self.completion_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turn) and _same_fields(self, other)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One linear path of T tokens with the provenance of each.

    `token_ids` int32 [T]; `loss_mask` uint8 [T], 1 where the policy sampled the token and it is kept; `logprobs`
    float32 [T], 0 where not sampled; `weight_version_spans` over the T tokens, -1 where not sampled, first start 0.
    `temperature` is the T of the log-probabilities (1 for a greedy request), so always above 0.
    """

    trajectory_id: str
    session_id: str
    family: str
    status: Status
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    weight_version_spans: tuple[Span, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    routed_experts: RoutedExperts | None = None
    reward: float | None = None
    temperature: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for array in (self.token_ids, self.loss_mask, self.logprobs):
            array.flags.writeable = False

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version that sampled a kept token; None when no token was sampled."""
        versions = span_values(self.weight_version_spans, self.n_tokens)[self.loss_mask == 1]
        return int(versions.min()) if len(versions) else None

    def with_reward(self, reward: float) -> Trajectory:
        """Return a copy that carries `reward`."""
        return replace(self, reward=float(reward))

    def validate(self) -> None:
        """Raise `TrajectoryError` that names the first field that contradicts the others, and its values."""
        from .validation import validate_trajectory

        validate_trajectory(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and _same_fields(self, other)


def _same_fields(one: Any, other: Any) -> bool:
    return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def runs(mask: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Half-open (start, end) of each run of ones in a 0/1 array."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield int(start), int(end)


def require(condition: bool, message: str) -> None:
    """Raise `TrajectoryError(message)` unless `condition`."""
    if not condition:
        raise TrajectoryError(message)
