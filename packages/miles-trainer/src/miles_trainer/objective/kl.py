"""Per-token estimators of the distance from a reference policy (spec 1.6), d = log π - log reference, in nats."""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3", "low_var"]

EXPONENT_BOUND = 20.0
RESULT_BOUND = 10.0


def kl_estimate(
    logprobs_M: torch.Tensor,
    reference_M: torch.Tensor,
    estimator: KlEstimator,
    *,
    importance_old_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d; low_var = k3 with exponent in ±20 and result in ±10. Shape [M].

    With `importance_old_M` (old log-probabilities) the estimate is multiplied by π/old with its gradient (the unbiased
    form); low_var applies it before its result bound. k1's gradient does not depend on the reference.
    """
    gap_M = logprobs_M - reference_M
    value_M = _raw(gap_M, estimator)
    if importance_old_M is not None:
        value_M = value_M * torch.exp(logprobs_M - importance_old_M)
    return value_M.clamp(-RESULT_BOUND, RESULT_BOUND) if estimator == "low_var" else value_M


def _raw(gap_M: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    if estimator == "k1":
        return gap_M
    if estimator == "k2":
        return gap_M.square() / 2
    negative_M = -gap_M
    if estimator == "low_var":
        negative_M = negative_M.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    return negative_M.exp() - 1 - negative_M
