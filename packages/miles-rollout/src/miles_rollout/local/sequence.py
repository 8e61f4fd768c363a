"""One request on its way through the engine: tokens, log-probabilities, versions, routes.

Shapes: T tokens of prompt and output, n consecutive ones, L MoE layers, K experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from miles_rollout.local.errors import EngineError
from miles_rollout.local.requests import EngineReply, EngineRequest, FinishReason
from miles_rollout.local.routes import Routes, version_spans

Deliver = Callable[["EngineReply | EngineError"], None]
"""Called once, on the engine thread, when a request has ended. Must not block or raise."""


class Sequence:
    """A request with its state. The engine thread owns it."""

    def __init__(
        self, request: EngineRequest, seed: int, arrival: int, deliver: Deliver, routes: Routes | None
    ) -> None:
        self.request = request
        self.seed = seed
        self.arrival = arrival
        self.deliver = deliver
        self.routes = routes
        self.n_input = len(request.input_ids)
        self._tokens_T = np.empty(self.n_input + request.sampling.max_new_tokens, dtype=np.int32)
        self._tokens_T[: self.n_input] = request.input_ids
        self.n_tokens = self.n_input
        self.row: int | None = None
        self.computed = 0
        self.cached_tokens: int | None = None
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.input_logprobs: list[float] = []
        self.started_s = time.monotonic()

    @property
    def tokens_T(self) -> NDArray[np.int32]:
        return self._tokens_T[: self.n_tokens]

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens_T[self.n_input :].tolist())

    @property
    def n_output(self) -> int:
        return self.n_tokens - self.n_input

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed yet."""
        return self.n_tokens - self.computed

    @property
    def wants_input_logprobs(self) -> bool:
        return self.request.return_logprob and self.request.logprob_start_len >= 0

    @property
    def reuse_limit(self) -> int:
        """Tokens that a prefix hit may cover: the last must be computed, and those whose logits were asked for."""
        return min(self.n_tokens - 1, self.next_scored if self.next_scored < self.n_input - 1 else self.n_tokens)

    @property
    def next_scored(self) -> int:
        """First position whose logits still have to give the log-probability of the input token after it."""
        if not self.wants_input_logprobs:
            return self.n_input - 1
        return self.request.logprob_start_len + len(self.input_logprobs)

    def recorded_routes(self, start: int, end: int) -> NDArray[np.int32] | None:
        """What a pass over [start, end) must repeat, int32 [n, L, K] with holes; None when nothing."""
        return None if self.routes is None else self.routes.recorded(start, end)

    def append(self, token: int, logprob: float, version: int) -> None:
        self._tokens_T[self.n_tokens] = token
        self.n_tokens += 1
        self.logprobs.append(logprob)
        self.versions.append(version)

    def leave_row(self) -> None:
        """Go back to the queue: what was computed has to be computed, or matched, again."""
        self.row = None
        self.computed = 0

    def reply(self, engine_id: str, finish: FinishReason, version: int, text: str) -> EngineReply:
        """Return what this request has consumed and produced so far, at the engine's `version`."""
        start = self.request.routed_experts_start_len
        end = max(start, self.n_tokens - 1)
        rows = self.routes.rows(start, end) if self.routes is not None and self.request.return_routed_experts else None
        return EngineReply(
            rid=self.request.rid,
            engine_id=engine_id,
            input_ids=self.request.input_ids,
            output_ids=self.output_ids,
            output_logprobs=np.array(self.logprobs, dtype=np.float32),
            finish=finish,
            cached_tokens=self.cached_tokens or 0,
            weight_version=self.versions[-1] if self.versions else version,
            weight_version_spans=version_spans(np.array(self.versions, dtype=np.int64)),
            routed_experts=rows,
            routed_experts_start=start if rows is not None else 0,
            routed_experts_version_spans=()
            if rows is None or not self.routes
            else self.routes.version_spans(start, end),
            input_logprobs=np.array(self.input_logprobs, dtype=np.float32) if self.wants_input_logprobs else None,
            text=text,
            e2e_latency_s=time.monotonic() - self.started_s,
        )
