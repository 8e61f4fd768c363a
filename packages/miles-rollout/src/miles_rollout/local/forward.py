"""One forward of the model over the packed tokens of a step.

Shapes: N packed tokens, M rows of logits, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from miles_rollout.local.attention import CONTEXT_KWARG, RowSegment, StepContext, step_context
from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.kv import KVRows
from miles_rollout.local.model import ServedModel
from miles_rollout.local.routes import HOLE
from miles_rollout.local.sampler import token_logprobs
from miles_rollout.local.scheduler import Segment
from miles_rollout.protocols import Numerics


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """Positions of a segment whose logits are used: `scored` ones first, then the last one if it `draws` a token."""

    segment: Segment
    scored: range
    draws: bool

    def packed(self, offset: int) -> list[int]:
        """Return these positions in the packed row, where the segment begins at `offset`."""
        shift = offset - self.segment.start
        drawn = [self.segment.end - 1 + shift] if self.draws else []
        return [position + shift for position in self.scored] + drawn

    def take_scores(self, logits_MV: torch.Tensor) -> None:
        """Append the log-probabilities of the input tokens that follow the scored positions."""
        if self.scored:
            sequence = self.segment.sequence
            following = sequence.tokens_T[self.scored.start + 1 : self.scored.stop + 1].tolist()
            sequence.input_logprobs.extend(token_logprobs(logits_MV, following))


def wanted_logits(segment: Segment) -> WantedLogits:
    """Return which logits of a segment are needed: the head runs for those only."""
    sequence = segment.sequence
    scored = range(max(segment.start, sequence.next_scored), min(segment.end, sequence.n_input - 1))
    return WantedLogits(segment, scored, segment.completes and sequence.request.sampling.max_new_tokens > 0)


class Forward:
    """Runs a served model over KV rows."""

    def __init__(self, model: ServedModel, kv: KVRows, numerics: Numerics | None) -> None:
        self._model = model
        self._kv = kv
        self._numerics = numerics

    def run(self, segments: Seq[Segment], wanted: Seq[WantedLogits]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Return the wanted logits [M, V], at least one row, and the routes [N, L, K]."""
        rows = [RowSegment(s.row, s.start, s.count) for s in segments]
        ids_N = np.concatenate([s.sequence.tokens_T[s.start : s.end] for s in segments])
        offsets = np.cumsum([0, *(s.count for s in segments)])
        keep = [p for w, offset in zip(wanted, offsets, strict=False) for p in w.packed(int(offset))]
        context = step_context(self._kv, rows, self._numerics)
        with self._model.capture.repeating(self._recorded_routes(segments)):
            return self._run_model(ids_N, context, keep or [len(ids_N) - 1])

    def _recorded_routes(self, segments: Seq[Segment]) -> torch.Tensor | None:
        """Return what the routers must repeat in this pass, [N, L, K] with holes; None when nothing."""
        found = [s.sequence.recorded_routes(s.start, s.end) for s in segments]
        if all(routes is None for routes in found):
            return None
        shape = self._model.capture.layout
        parts = [
            np.full((s.count, len(shape.layers), shape.top_k), HOLE, dtype=np.int32) if routes is None else routes
            for s, routes in zip(segments, found, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def probe(self) -> None:
        """Run two tokens through row 0. Raises `EngineSetupError` unless each layer met our attention exactly once."""
        context = step_context(self._kv, [RowSegment(0, 0, 2)], self._numerics)
        self._run_model(np.zeros(2, dtype=np.int32), context, [1])
        expected = list(range(len(self._kv.keys)))
        if context.layers_seen != expected:
            raise EngineSetupError(
                f"{type(self._model.module).__name__} called the engine's attention in layers {context.layers_seen}; "
                f"{expected} was expected: this model family is not served by the local engine",
                code="unsupported_model",
            )

    @torch.no_grad()
    def _run_model(
        self, ids_N: NDArray[np.int32], context: StepContext, keep: list[int]
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        with self._numerics.forward() if self._numerics is not None else nullcontext():
            output = self._model.module(
                input_ids=torch.from_numpy(ids_N.astype(np.int64))[None],
                position_ids=context.position_N[None],
                use_cache=False,
                logits_to_keep=torch.tensor(keep),
                **{CONTEXT_KWARG: context},
            )
        return output.logits[0], self._model.capture.take(len(ids_N))
