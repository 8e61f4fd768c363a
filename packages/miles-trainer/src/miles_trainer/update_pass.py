"""The update pass of one micro-batch: from logits to the terms of its trained tokens, and their place in the step.

Shapes: M trained tokens of the step, m those of the micro-batch, P its predictions, V vocabulary.
"""

from __future__ import annotations

import torch

from miles_trainer.config import ObjectiveConfig
from miles_trainer.micro_batch import MicroBatch
from miles_trainer.objective.logprob import predicted_logprobs
from miles_trainer.objective.token_terms import TermOptions, TokenInputs, TokenTerms
from miles_trainer.report import UpdateArrays
from miles_trainer.step_batch import StepBatch


def term_options(objective: ObjectiveConfig) -> TermOptions:
    """The options of the objective as its token terms take them."""
    return TermOptions(
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        tis=(objective.tis.low, objective.tis.high) if objective.tis.enabled else None,
        kl_coef=objective.kl.coef,
        kl_estimator=objective.kl.estimator,
        kl_unbiased=objective.kl.unbiased,
        entropy_coef=objective.entropy_coef,
    )


def token_inputs(
    batch: StepBatch,
    micro: MicroBatch,
    logits_PV: torch.Tensor,
    *,
    old_M: torch.Tensor | None,
    reference_M: torch.Tensor | None,
    chunk: int,
) -> TokenInputs:
    """What the token terms need of the micro-batch. Without `old_M` this pass gives the old log-probabilities."""
    rows = micro.rows
    found = predicted_logprobs(logits_PV, micro.temperatures, batch.targets[rows], micro.predictions, chunk=chunk)
    return TokenInputs(
        logprobs=found.logprobs,
        entropy=found.entropy[micro.predictions],
        old=found.logprobs.detach() if old_M is None else old_M[rows].float(),
        rollout=batch.rollout_logprobs[rows],
        reference=None if reference_M is None else reference_M[rows].float(),
        advantages=batch.advantages[rows],
        mask=batch.usable[rows],
        sample_index=batch.sample_index[rows],
        n_samples=len(batch.samples),
    )


class StepResults:
    """Results of one optimizer step, gathered over micro-batches and ranks, float64 [7, M]."""

    def __init__(self, n_tokens: int) -> None:
        self.arrays_7M = torch.zeros(7, n_tokens, dtype=torch.float64)

    def put(self, micro: MicroBatch, inputs: TokenInputs, terms: TokenTerms) -> None:
        """Store what one micro-batch found at its rows."""
        ones = torch.ones_like(terms.policy)
        kl = terms.kl if terms.kl is not None else torch.zeros_like(ones)
        weight = terms.correction.weight if terms.correction is not None else ones
        bounded = terms.correction.bounded if terms.correction is not None else torch.zeros_like(ones)
        columns = [inputs.logprobs, terms.entropy, terms.policy, kl, terms.loss.clipped, weight, bounded]
        self.arrays_7M[:, micro.rows] = torch.stack([column.detach().double() for column in columns])

    def update_arrays(self) -> UpdateArrays:
        """The arrays that the objective's metrics are made of."""
        return UpdateArrays(*self.arrays_7M[:5])

    def weights(self) -> torch.Tensor:
        """Correction weight of each token, [M]."""
        return self.arrays_7M[5]

    def bounded(self) -> torch.Tensor:
        """1 where a bound changed the weight, [M]."""
        return self.arrays_7M[6]
