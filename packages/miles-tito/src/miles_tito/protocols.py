"""What miles-tito needs from outside, and the values that cross that seam.

Shapes: P prompt tokens, N output tokens, R expert rows, L routed (MoE) layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

FinishKind = Literal["stop", "length", "abort"]
Span = tuple[int, int]
"""(start, version): from index `start` on, until the next span, the version is `version`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one engine call, in SGLang's names. Defaults sample from the plain softmax."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One engine call: token ids in, token ids out.

    `expert_prefix`, int32 [expert_row_start, L, K], are the routes already recorded for the first tokens. An engine
    that replays routes (`MoeInfo.replays_routes`) repeats them where it has to compute those tokens again; others are
    not sent any.
    """

    request_id: str
    session_key: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    want_experts: bool = False
    expert_row_start: int = 0
    extra_key: str | None = None
    expert_prefix: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why generation ended. `matched` is the stop id or stop string when `kind` is "stop"."""

    kind: FinishKind
    matched: int | str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Routes of consecutive tokens: int32 [R, L, K]; row 0 is that of token `row_start` of input + output."""

    rows: NDArray[np.int32]
    row_start: int
    version_spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """What the engine sampled. `logprobs` is float32 [N]; `version_spans` count output tokens from 0."""

    request_id: str
    engine_id: str
    output_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    version_spans: tuple[Span, ...]
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    record_digest: str
    expert_digest: str | None = None
    experts: ExpertRows | None = None
    latency_s: float | None = None
    unknown_fields: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class MoeInfo:
    """Which layers are routed (global indices), how many experts each has, and how many a token takes.

    `replays_routes`: the engine takes `GenerateRequest.expert_prefix` and keeps to it.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    replays_routes: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself (`GET /model_info`)."""

    engine_id: str
    model_path: str
    weight_version: int | None
    moe: MoeInfo | None = None
    max_context: int | None = None


@runtime_checkable
class TokenEngine(Protocol):
    """An engine that takes token ids and returns token ids. Implementations raise `EngineError` and its subclasses."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample a continuation of `request.input_ids`."""
        ...

    async def abort(self, request_id: str) -> None:
        """Cancel a request whose client has gone. Unknown ids are ignored."""
        ...

    async def describe(self) -> EngineInfo:
        """Return what the engine says of itself."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...
