"""Requests and replies of the engine, and the checks a request passes before it is queued. Torch-free.

Shapes: O output tokens, R expert rows, P rows of a prefix, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from miles_rollout.local.errors import RequestError
from miles_rollout.local.routes import RouteLayout, check_prefix
from miles_rollout.records import Record, Span

MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Names and meanings are SGLang's.

    `temperature` 0 is greedy. `top_k` -1 keeps all. `sampling_seed` makes draw `k` a function of the seed and `k` only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue or, with `max_new_tokens` 0 and a `logprob_start_len`, to score.

    `routed_experts_prefix`, int32 [P, L, K] with P = `routed_experts_start_len`, are routes that an engine gave for the
    first P positions: they are repeated, whatever the weights of today would choose.
    """

    input_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rid: str = ""
    return_logprob: bool = True
    logprob_start_len: int = -1
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    extra_key: str | None = None
    routed_experts_prefix: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended. `matched` is the stop id or stop string, `message` the reason of an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What the engine consumed and produced for one request.

    `output_logprobs` is float32[O], `routed_experts` int32[R, L, K] or None, `input_logprobs` the log-probabilities of
    the input ids from `logprob_start_len` + 1 on (None unless asked for).
    """

    rid: str
    engine_id: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: NDArray[np.float32]
    finish: FinishReason
    cached_tokens: int
    weight_version: int
    weight_version_spans: tuple[Span, ...]
    routed_experts: NDArray[np.int32] | None
    routed_experts_start: int
    routed_experts_version_spans: tuple[Span, ...]
    input_logprobs: NDArray[np.float32] | None
    text: str
    e2e_latency_s: float

    @property
    def record(self) -> Record:
        """The record whose digest goes into `meta_info.record_digest`."""
        return Record(
            input_ids=self.input_ids,
            output_ids=self.output_ids,
            logprobs=self.output_logprobs,
            version_spans=self.weight_version_spans,
            experts=self.routed_experts,
            expert_row_start=self.routed_experts_start if self.routed_experts is not None else 0,
            expert_version_spans=self.routed_experts_version_spans,
        )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a model and an engine can serve."""

    vocab_size: int
    max_context: int
    has_tokenizer: bool
    routes: RouteLayout


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Raise `RequestError` when `request` can never be served: the engine thread meets only sound requests."""
    _check_ids(request, limits)
    _check_sampling(request.sampling, limits)
    _check_extras(request, limits)


def _refuse(code: str, message: str) -> RequestError:
    return RequestError(message, code=code)


def _check_ids(request: EngineRequest, limits: RequestLimits) -> None:
    n = len(request.input_ids)
    if n == 0:
        raise _refuse("empty_input", "input_ids is empty: a request needs at least one token")
    lowest, highest = min(request.input_ids), max(request.input_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        bad = lowest if lowest < 0 else highest
        raise _refuse("token_out_of_range", f"input_ids holds {bad}; the vocabulary is 0 to {limits.vocab_size - 1}")
    total = n + request.sampling.max_new_tokens
    if total > limits.max_context:
        raise _refuse(
            "context_too_long",
            f"{n} input tokens and max_new_tokens {request.sampling.max_new_tokens} make {total}; the engine's context "
            f"is {limits.max_context}: shorten the input, lower max_new_tokens or raise engine.max_context",
        )


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    rules = {
        "temperature": 0.0 <= sampling.temperature < float("inf"),
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "top_k": sampling.top_k == -1 or sampling.top_k >= 1,
        "max_new_tokens": sampling.max_new_tokens >= 0,
        "sampling_seed": sampling.sampling_seed is None or 0 <= sampling.sampling_seed <= MAX_SEED,
        "stop": all(sampling.stop),
    }
    for name, holds in rules.items():
        if not holds:
            raise _refuse("invalid_sampling", f"sampling_params.{name} is {getattr(sampling, name)!r}: out of range")
    if sampling.stop and not limits.has_tokenizer:
        raise _refuse("no_tokenizer", "stop strings need a tokenizer.json in the model folder: use stop_token_ids")


def _check_extras(request: EngineRequest, limits: RequestLimits) -> None:
    n = len(request.input_ids)
    if not -1 <= request.logprob_start_len < n:
        raise _refuse(
            "invalid_logprob_start", f"logprob_start_len is {request.logprob_start_len}; it must be -1 or 0 to {n - 1}"
        )
    _check_experts(request, limits)


def _check_experts(request: EngineRequest, limits: RequestLimits) -> None:
    n = len(request.input_ids)
    if not request.return_routed_experts:
        if request.routed_experts_prefix is not None:
            raise _refuse("invalid_experts_prefix", "routed_experts_prefix needs return_routed_experts")
        return
    if not limits.routes.layers:
        raise _refuse("no_experts", "return_routed_experts was asked of a model without routed experts of a known kind")
    if not 0 <= request.routed_experts_start_len < n:
        raise _refuse(
            "invalid_experts_start",
            f"routed_experts_start_len is {request.routed_experts_start_len}; it must be 0 to {n - 1}",
        )
    if request.routed_experts_prefix is not None:
        check_prefix(request.routed_experts_prefix, request.routed_experts_start_len, limits.routes)
