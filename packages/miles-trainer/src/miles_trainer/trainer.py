"""The trainer: scores a batch, computes the objective, updates the weights, and says what it did.

Every rank is given the same samples and takes its share; each call is collective.

Shapes: M trained tokens of the step, m those of a micro-batch, P its predictions, V vocabulary, T tokens of a sample.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_trainer import checkpoint, report
from miles_trainer.backends.fsdp2 import Fsdp2Backend, PackedModel
from miles_trainer.config import TrainerConfig
from miles_trainer.distributed import RankGroup
from miles_trainer.errors import ObjectiveWarning, SampleError
from miles_trainer.export import ExportDtype, HfWeights
from miles_trainer.micro_batch import MicroBatch, plan_micro_batches
from miles_trainer.model import load_model, vocabulary_size
from miles_trainer.objective.logprob import predicted_logprobs
from miles_trainer.objective.token_terms import supervised_loss, token_terms, total_loss
from miles_trainer.protocols import Meter, Numerics, Quantizer
from miles_trainer.quantized import quantize_linears
from miles_trainer.replay.router import RouteCounts, RouteReplay
from miles_trainer.report import StepReport
from miles_trainer.sample import Sample
from miles_trainer.step_batch import (
    StepBatch,
    build_scoring_step,
    build_step,
    build_supervised_step,
    check_sample,
    rollout_advantages,
)
from miles_trainer.update_pass import StepResults, term_options, token_inputs
from miles_trainer.versions import check_versions

Scores = Callable[[MicroBatch], torch.Tensor]


@dataclass(slots=True)
class TrainerState:
    """Counters that a checkpoint carries. `version`: of the weights; `updates`: optimizer steps applied, which drive
    the rate.
    """

    version: int = 0
    updates: int = 0
    skipped: int = 0


class Trainer:
    """Owns the policy model, its optimizer and, when the KL coefficient is above 0, a frozen copy of the starting
    weights.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_dir: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        init_method: str | None = None,
        numerics: Numerics | None = None,
        quantizer: Quantizer | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Load `model_dir` and join the other ranks.

        `init_method` is needed with several ranks, for example `tcp://127.0.0.1:29500`. Raises ModelError, ReplayError,
        RankError.
        """
        self.config, self.model_dir = config, Path(model_dir)
        self.state = TrainerState()
        self._meter = meter
        torch.manual_seed(config.seed)
        self.group = RankGroup(rank, world_size, init_method=init_method, timeout_s=config.fsdp.collective_timeout_s)
        try:
            self._load(numerics, quantizer)
        except BaseException:
            self.group.close()
            raise

    def _load(self, numerics: Numerics | None, quantizer: Quantizer | None) -> None:
        config = self.config
        model = load_model(self.model_dir)
        self.vocab_size = vocabulary_size(model)
        self._replay = RouteReplay(model) if config.replay.enabled else None
        if quantizer is not None:
            quantize_linears(model, quantizer)
        self.backend = Fsdp2Backend(model, self.group, config.fsdp, config.optimizer, numerics=numerics)
        self._reference = None
        if config.objective.kl.coef > 0:
            frozen = load_model(self.model_dir).requires_grad_(False)
            self._reference = PackedModel(frozen, self.group, config.fsdp, numerics)
            if config.objective.kl.estimator == "k1" and not config.objective.kl.unbiased:
                warnings.warn(
                    "the gradient of k1 in the loss does not depend on the reference: it only pushes sampled tokens "
                    "down; "
                    "use k2, low_var or unbiased = true",
                    ObjectiveWarning,
                    stacklevel=4,
                )

    @property
    def version(self) -> int:
        """Version of the weights: 0 as loaded, one more after each `train`."""
        return self.state.version

    # Training

    def train(self, samples: Sequence[Sample], *, step: int) -> StepReport:
        """One batch: score it, make `n_updates_per_batch` optimizer steps, and report.

        Groups whose rewards are equal are counted and, without a KL or entropy term, left out of the computation.
        Without any usable token nothing is changed, and the version still advances. Raises SampleError, GroupError,
        VersionIdentityError, ReplayError before anything is changed.
        """
        started_s = time.perf_counter()
        self._check(samples)
        check_versions(samples, current=self.version)
        objective = self.config.objective
        advantages = rollout_advantages(samples, objective)
        every_term = objective.kl.coef > 0 or objective.entropy_coef > 0
        batch = build_step(
            samples, advantages.by_rollout, objective, skip_groups=() if every_term else advantages.no_spread
        )
        metrics = report.rollout_metrics(samples, advantages)
        skipped = 0 if batch.n_tokens else self.config.n_updates_per_batch
        if batch.n_tokens:
            found, skipped = self._train_batch(batch)
            metrics |= found
        self.state.version += 1
        self.state.skipped += skipped
        metrics |= {
            "train/step": float(step),
            "skipped_steps": float(skipped),
            "trained_tokens": float(batch.n_tokens),
            "perf/train_time": time.perf_counter() - started_s,
        }
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._publish(metrics)
        return StepReport(
            step=step,
            version=self.version,
            metrics=metrics,
            rollout_ids=tuple(dict.fromkeys(sample.rollout_id for sample in samples)),
            group_ids=advantages.group_ids,
            no_spread=advantages.no_spread,
            trained_tokens=batch.n_tokens,
            skipped_steps=skipped,
        )

    def _check(self, samples: Sequence[Sample]) -> None:
        """Every rank checks every sample, so that all of them fail together and none waits for another."""
        if not samples:
            raise SampleError("a step needs at least one sample")
        for sample in samples:
            check_sample(sample, self.vocab_size)
        if self._replay is not None:
            self._replay.check(samples)

    def _publish(self, metrics: Mapping[str, float]) -> None:
        if self._meter is not None:
            for name, value in metrics.items():
                self._meter.gauge(name, value)

    def _train_batch(self, batch: StepBatch) -> tuple[dict[str, float], int]:
        micro_batches = self._plan(batch, replay=True)
        metrics = self._packing_metrics(micro_batches)
        with self._routes(micro_batches):
            began_s = time.perf_counter()
            recompute = self.config.objective.old_logprobs == "recompute"
            old_M = self._scored(batch, micro_batches, self.backend.logits, replay=True) if recompute else None
            metrics |= self._replay_metrics() if recompute else {}
            scored_s = time.perf_counter()
            reference_M = self._reference_scores(batch, micro_batches)
            referred_s = time.perf_counter()
            found, first_M, skipped = self._updates(batch, micro_batches, old_M, reference_M)
            metrics |= {} if recompute else self._replay_metrics()
        metrics |= report.score_metrics(batch, first_M, reference_M)
        metrics |= report.mismatch_metrics(batch, first_M, self.version)
        metrics |= found | {
            "perf/log_probs_time": scored_s - began_s,
            "perf/ref_log_probs_time": referred_s - scored_s,
            "perf/actor_train_time": time.perf_counter() - referred_s,
        }
        return metrics, skipped

    def _updates(
        self,
        batch: StepBatch,
        micro_batches: Sequence[MicroBatch],
        old_M: torch.Tensor | None,
        reference_M: torch.Tensor | None,
    ) -> tuple[dict[str, float], torch.Tensor, int]:
        """The optimizer steps: mean metrics, the old log-probabilities [M], and how many changed nothing."""
        records: list[dict[str, float]] = []
        skipped = 0
        objective = self.config.objective
        for _ in range(self.config.n_updates_per_batch):
            results = self._accumulate(batch, micro_batches, old_M, reference_M)
            arrays = results.update_arrays()
            old_M = arrays.logprobs if old_M is None else old_M
            outcome = self.backend.update(self._learning_rate())
            metrics = report.objective_metrics(batch, old_M, arrays, objective.kl.coef, objective.entropy_coef)
            metrics |= self._correction_metrics(batch, old_M, results)
            metrics |= {"train/grad_norm": outcome.grad_norm, "train/lr-pg_0": self._learning_rate()}
            records.append(metrics)
            self.state.updates += outcome.applied
            skipped += not outcome.applied
        assert old_M is not None
        return {name: float(np.mean([record[name] for record in records])) for name in records[0]}, old_M, skipped

    def _learning_rate(self) -> float:
        options = self.config.optimizer
        if options.warmup_steps == 0:
            return options.learning_rate
        return options.learning_rate * min(1.0, (self.state.updates + 1) / options.warmup_steps)

    def _accumulate(
        self,
        batch: StepBatch,
        micro_batches: Sequence[MicroBatch],
        old_M: torch.Tensor | None,
        reference_M: torch.Tensor | None,
    ) -> StepResults:
        """Forward and backward of each micro-batch; the results of the whole step afterwards, on every rank."""
        options = term_options(self.config.objective)
        results = StepResults(batch.n_tokens)
        chunk = self.config.packing.log_probs_chunk
        for micro in micro_batches:
            with self._playing(micro):
                logits_PV = self.backend.logits(micro)
                if micro.is_filler:
                    self.backend.backward(logits_PV.sum() * 0)
                    continue
                inputs = token_inputs(batch, micro, logits_PV, old_M=old_M, reference_M=reference_M, chunk=chunk)
                del logits_PV
                terms = token_terms(inputs, options)
                self.backend.backward(total_loss(terms, batch.weights[micro.rows], options))
            results.put(micro, inputs, terms)
        self.group.sum(results.arrays_7M)
        return results

    def _correction_metrics(self, batch: StepBatch, old_M: torch.Tensor, results: StepResults) -> dict[str, float]:
        if not self.config.objective.tis.enabled:
            return {}
        usable_M = batch.usable
        ratio_M = (old_M - batch.rollout_logprobs.double()).clamp(-20, 20).exp()
        return report.correction_metrics(results.weights()[usable_M], ratio_M[usable_M], results.bounded()[usable_M])

    def train_supervised(self, samples: Sequence[Sample]) -> float:
        """One optimizer step on the mean negative log-likelihood (nats a token) of the tokens with mask 1; returns it.

        The mask marks targets; temperatures, rewards and versions play no part, routers choose for themselves, and the
        version does not advance: this prepares a starting point.
        """
        self._check(samples)
        batch = build_supervised_step(samples)
        if not batch.n_tokens:
            raise SampleError("no sample has a token with mask 1: there is nothing to learn from")
        loss = torch.zeros(1, dtype=torch.float64)
        for micro in self._plan(batch, replay=False):
            logits_PV = self.backend.logits(micro)
            if micro.is_filler:
                self.backend.backward(logits_PV.sum() * 0)
                continue
            part = supervised_loss(self._logprobs(batch, micro, logits_PV), batch.weights[micro.rows])
            self.backend.backward(part)
            loss += part.detach()
        self.state.updates += self.backend.update(self._learning_rate()).applied
        return float(self.group.sum(loss))

    # Scoring

    def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Log-probabilities (nats, at each sample's temperature) under the current weights, float32 [T] each; 0 where
        mask is 0.

        Recorded routes are replayed as in training.
        """
        self._check(samples)
        batch = build_scoring_step(samples)
        scores_M = torch.zeros(0, dtype=torch.float64)
        if batch.n_tokens:
            micro_batches = self._plan(batch, replay=True)
            with self._routes(micro_batches):
                scores_M = self._scored(batch, micro_batches, self.backend.logits, replay=True)
        return [_at_tokens(batch, scores_M, index) for index in range(len(batch.samples))]

    def _scored(
        self, batch: StepBatch, micro_batches: Sequence[MicroBatch], logits: Scores, *, replay: bool
    ) -> torch.Tensor:
        """Log-probabilities of the whole step, float64 [M] with fp32 values, on every rank."""
        scores_M = torch.zeros(batch.n_tokens, dtype=torch.float64)
        with torch.no_grad():
            for micro in micro_batches:
                with self._playing(micro) if replay else nullcontext():
                    logits_PV = logits(micro)
                if not micro.is_filler:
                    scores_M[micro.rows] = self._logprobs(batch, micro, logits_PV).double()
        return self.group.sum(scores_M)

    def _logprobs(self, batch: StepBatch, micro: MicroBatch, logits_PV: torch.Tensor) -> torch.Tensor:
        """Of the micro-batch's rows, [m], with gradient."""
        chunk = self.config.packing.log_probs_chunk
        targets_m = batch.targets[micro.rows]
        return predicted_logprobs(
            logits_PV, micro.temperatures, targets_m, micro.predictions, chunk=chunk, with_entropy=False
        ).logprobs

    def _reference_scores(self, batch: StepBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        if self._reference is None:
            return None
        return self._scored(batch, micro_batches, self._reference.logits, replay=False)

    def _plan(self, batch: StepBatch, *, replay: bool) -> list[MicroBatch]:
        return plan_micro_batches(
            batch,
            self.config.packing,
            routes=self._replay.rows(batch.samples) if self._replay is not None and replay else None,
            rank=self.group.rank,
            n_ranks=self.group.world_size,
        )

    def _packing_metrics(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Tokens that one pass over the batch computes, those it needs not compute again, and their ratio."""
        mine = [(micro.computed_tokens, micro.shared_tokens) for micro in micro_batches if not micro.is_filler]
        computed, shared = self.group.sum(torch.tensor(mine or [(0, 0)], dtype=torch.int64).sum(0)).tolist()
        return {
            "perf/computed_tokens": float(computed),
            "perf/shared_tokens": float(shared),
            "perf/packing_ratio": (computed + shared) / computed,
        }

    # Routing replay

    def _routes(self, micro_batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        return nullcontext() if self._replay is None else self._replay.loaded(micro_batches)

    def _playing(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext() if self._replay is None else self._replay.playing(micro.index)

    def _replay_metrics(self) -> dict[str, float]:
        if self._replay is None:
            return {}
        played = RouteCounts(*self.group.sum(torch.tensor(self._replay.counts(), dtype=torch.int64)).tolist())
        if not played.routes:
            return {"replay/routes": 0.0}
        return {
            "replay/routes": float(played.routes),
            "replay/route_mismatch": played.differing_routes / played.routes,
            "replay/choice_mismatch": played.differing_choices / played.choices,
        }

    # Weights out, state in and out

    def export(self, dtype: ExportDtype = "BF16", *, dtypes: Mapping[str, ExportDtype] | None = None) -> HfWeights:
        """The current weights under their Hugging Face names; `dtypes` overrides the format by name."""
        return HfWeights(self.backend, self.group, self.model_dir, dtype=dtype, dtypes=dtypes)

    def save(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, on_event: Callable[[str], None] | None = None
    ) -> Path:
        """Write a checkpoint `folder`/step_<version> and return its path. `extra` is JSON data of the caller."""
        return checkpoint.save(self, Path(folder), extra=extra, on_event=on_event)

    def load(self, path: Path, *, allow_config_change: bool = False) -> Mapping[str, Any]:
        """Restore weights, moments, counters and random state from a checkpoint; returns its `extra`."""
        return checkpoint.load(self, Path(path), allow_config_change=allow_config_change)

    def close(self) -> None:
        """Remove hooks and leave the rank group; of several ranks, let the models go. No call works afterwards."""
        if self._replay is not None:
            self._replay.close()
        if self.group.world_size > 1 and hasattr(self, "backend"):
            # Sharded parameters hold the process group. If it outlived destroy_process_group, its threads would be torn
            # down at interpreter exit, which aborts the process now and then.
            del self.backend, self._reference
            gc.collect()
        self.group.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _at_tokens(batch: StepBatch, scores_M: torch.Tensor, index: int) -> NDArray[np.float32]:
    result_T = np.zeros(len(batch.samples[index].token_ids), dtype=np.float32)
    span = slice(batch.offsets[index], batch.offsets[index + 1])
    result_T[batch.positions[span].numpy()] = scores_M[span].numpy()
    return result_T
