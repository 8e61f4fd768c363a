"""The engine without threads: queue, steps, pauses and versions. One thread, or the caller of `generate_sync`, owns it.

Shapes: N packed tokens, n tokens of one segment, M rows of logits, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from miles_rollout.local.config import EngineConfig
from miles_rollout.local.errors import EngineBusyError, EngineClosedError, EngineError, EnginePoisonedError
from miles_rollout.local.forward import Forward, WantedLogits, wanted_logits
from miles_rollout.local.kv import KVRows, plan_rows
from miles_rollout.local.model import ServedModel
from miles_rollout.local.requests import EngineRequest, FinishReason, check_request
from miles_rollout.local.routes import Routes
from miles_rollout.local.sampler import Draw, sample
from miles_rollout.local.scheduler import Scheduler, Segment
from miles_rollout.local.sequence import Deliver, Sequence
from miles_rollout.local.stops import finish_reason, visible_text
from miles_rollout.protocols import Numerics, PauseMode

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of this moment."""

    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    failed_steps: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    version: int
    paused: bool
    poisoned: bool


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0


class EngineCore:
    """Runs requests step by step over a served model."""

    def __init__(self, model: ServedModel, config: EngineConfig, engine_id: str, numerics: Numerics | None) -> None:
        self.model = model
        self.config = config
        self.engine_id = engine_id
        self.version = 0
        self.paused: PauseMode | None = None
        self.poison_reason: str | None = None
        rows = plan_rows(model.kv_layout, config, model.limits.max_context)
        self.kv = KVRows(model.kv_layout, model.capture.layout, rows, model.limits.max_context)
        self._scheduler = Scheduler(
            self.kv,
            max_running=config.max_running,
            prefill_chunk=config.prefill_chunk,
            token_budget=config.token_budget,
        )
        self._arrivals = 0
        self._counters = _Counters()
        self._forward = Forward(model, self.kv, numerics)
        self._forward.probe()

    @property
    def has_work(self) -> bool:
        return self.paused is None and bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return not (self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        c = self._counters
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            generated_tokens=c.generated_tokens,
            steps=c.steps,
            failed_steps=c.failed_steps,
            kv_used_tokens=self.kv.table.cached_tokens,
            kv_capacity_tokens=self.kv.capacity_tokens,
            version=self.version,
            paused=self.paused is not None,
            poisoned=self.poison_reason is not None,
        )

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        """Queue a request; `deliver` is then called exactly once. Raises `RequestError` or `EnginePoisonedError`."""
        self.check_serving()
        check_request(request, self.model.limits)
        self._arrivals += 1
        seed = request.sampling.sampling_seed
        if seed is None:
            seed = int(np.random.SeedSequence([self.config.seed, self._arrivals]).generate_state(1, np.uint64)[0])
        named = request if request.rid else replace(request, rid=uuid4().hex)
        self._scheduler.add(Sequence(named, seed, self._arrivals, deliver, self._new_routes(request)))
        self._counters.prompt_tokens += len(request.input_ids)

    def check_serving(self) -> None:
        if self.poison_reason is not None:
            raise EnginePoisonedError(
                f"engine {self.engine_id} does not generate: {self.poison_reason}; install a whole set of weights"
            )

    def abort(self, rid_prefix: str, reason: str = "aborted on request") -> int:
        """End the requests whose id starts with `rid_prefix` ("" = all) with what they have; return how many."""
        return self._abort([s for s in self._scheduler.sequences if s.request.rid.startswith(rid_prefix)], reason)

    def abandon(self, request: EngineRequest) -> None:
        """End one request that nobody waits for any more."""
        self._abort([s for s in self._scheduler.sequences if s.request is request], "the client went away")

    def _abort(self, ended: Seq[Sequence], reason: str) -> int:
        for sequence in ended:
            self._finish(sequence, FinishReason("abort", message=reason))
        return len(ended)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. `abort` ends all requests, `retract` frees their rows, `in_place` freezes them."""
        if mode == "abort":
            self.abort("", "aborted by a pause")
        elif mode == "retract":
            self._scheduler.retract_all()
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def flush(self) -> None:
        """Empty the prefix cache. Raises `EngineBusyError` while requests hold rows."""
        if self.kv.table.held_rows or (self.paused is None and self._scheduler.waiting):
            raise EngineBusyError(
                f"the cache cannot be flushed: {self.kv.table.held_rows} requests hold rows and "
                f"{len(self._scheduler.waiting)} wait; pause with mode retract or abort first"
            )
        self.kv.table.flush()

    def start_version(self, version: int) -> None:
        """From now on the weights are `version`. Rows that go on under it become mixed and are never matched."""
        self.version = version
        self.kv.table.start_version(version)

    def poison(self, reason: str) -> None:
        """Fail all requests and refuse new ones until `cure`."""
        self.poison_reason = reason
        error = EnginePoisonedError(f"engine {self.engine_id} was poisoned: {reason}")
        self._fail_all(error)

    def cure(self) -> None:
        self.poison_reason = None

    def close(self) -> None:
        self._fail_all(EngineClosedError(f"engine {self.engine_id} was shut down"))

    def step(self) -> None:
        """Compute one batch. An exception ends that batch's requests, with what they have, and nothing else."""
        segments = self._scheduler.plan(self.version)
        if not segments:
            return
        self._counters.steps += 1
        wanted = [wanted_logits(segment) for segment in segments]
        try:
            logits_MV, routes_NLK = self._forward.run(segments, wanted)
            self._record(segments, routes_NLK)
            self._consume(wanted, logits_MV)
        except Exception as error:  # noqa: BLE001 - whatever a batch raises must not end the engine thread
            self._counters.failed_steps += 1
            self._fail_batch(segments, error)

    def _new_routes(self, request: EngineRequest) -> Routes | None:
        if not request.return_routed_experts:
            return None
        tokens = len(request.input_ids) + request.sampling.max_new_tokens
        return Routes.empty(tokens, self.model.capture.layout, request.routed_experts_prefix)

    def _record(self, segments: Seq[Segment], routes_NLK: NDArray[np.int64]) -> None:
        """Note what the rows hold now, the routes of this pass, and which weights chose them."""
        offset = 0
        for s in segments:
            routes_nLK = routes_NLK[offset : offset + s.count]
            versions_n = np.full(s.count, self.version, dtype=np.int64)
            if s.sequence.routes is not None:
                s.sequence.routes.fill(s.start, routes_nLK, versions_n)
                versions_n = s.sequence.routes.versions_T[s.start : s.end]
            self.kv.table.extend(s.row, s.sequence.tokens_T[s.start : s.end], routes_nLK, versions_n)
            s.sequence.computed = s.end
            offset += s.count

    def _consume(self, wanted: Seq[WantedLogits], logits_MV: torch.Tensor) -> None:
        """Take input log-probabilities, then draw the next tokens."""
        drawing: list[Sequence] = []
        rows: list[int] = []
        index = 0
        for w in wanted:
            w.take_scores(logits_MV[index : index + len(w.scored)])
            index += len(w.scored)
            if w.draws:
                drawing.append(w.segment.sequence)
                rows.append(index)
                index += 1
        if drawing:
            self._draw(drawing, logits_MV[rows])
        for w in wanted:
            if w.segment.completes and not w.segment.sequence.request.sampling.max_new_tokens:
                self._finish(w.segment.sequence, FinishReason("length"))

    def _draw(self, drawing: Seq[Sequence], logits_MV: torch.Tensor) -> None:
        draws = [_draw_of(sequence) for sequence in drawing]
        ids, logprobs = sample(logits_MV, draws)
        for sequence, token, logprob in zip(drawing, ids, logprobs, strict=True):
            if not math.isfinite(logprob):
                reason = "the model's logits are not finite: its weights are not usable"
                self._finish(sequence, FinishReason("abort", message=reason), trusted=False)
                continue
            sequence.append(token, logprob, self.version)
            self._counters.generated_tokens += 1
            finish = finish_reason(sequence, self.model.eos_ids, self.model.detokenize)
            if finish is not None:
                self._finish(sequence, finish)

    def _finish(self, sequence: Sequence, finish: FinishReason, *, trusted: bool = True) -> None:
        self._scheduler.retire(sequence, trusted=trusted)
        self._counters.cached_tokens += sequence.cached_tokens or 0
        text = visible_text(sequence, finish, self.model.detokenize)
        sequence.deliver(sequence.reply(self.engine_id, finish, self.version, text))

    def _fail_batch(self, segments: Seq[Segment], error: Exception) -> None:
        message = f"the engine step failed: {type(error).__name__}: {error}"
        _LOG.error("%s\n%s", message, "".join(traceback.format_exception(error)))
        running = set(map(id, self._scheduler.running))
        for s in segments:
            if id(s.sequence) in running:
                self._finish(s.sequence, FinishReason("abort", message=message), trusted=False)

    def _fail_all(self, error: EngineError) -> None:
        for sequence in self._scheduler.sequences:
            self._scheduler.retire(sequence, trusted=False)
            sequence.deliver(error)


def _draw_of(sequence: Sequence) -> Draw:
    sampling = sequence.request.sampling
    return Draw(sampling.temperature, sampling.top_p, sampling.top_k, sequence.seed, sequence.n_output)
