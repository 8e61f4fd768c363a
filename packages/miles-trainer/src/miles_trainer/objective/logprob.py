"""Log-probabilities and entropies at given positions (spec 1.2), in nats.

Shapes: P predictions, m tokens that read them, V vocabulary, C predictions of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch


def tempered_log_softmax(logits_MV: torch.Tensor, temperature_M: torch.Tensor | float) -> torch.Tensor:
    """log-softmax of logits / T, [M, V], in fp32 or wider. T is the rollout's temperature, above 0."""
    wide_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    if isinstance(temperature_M, torch.Tensor):
        wide_MV = wide_MV / temperature_M.to(wide_MV.dtype)[:, None]
    elif temperature_M != 1.0:
        wide_MV = wide_MV / temperature_M
    return torch.log_softmax(wide_MV, dim=-1)


def token_logprobs(log_softmax_MV: torch.Tensor, tokens_M: torch.Tensor) -> torch.Tensor:
    """Log-probability of the given token at each position, [M]."""
    return log_softmax_MV.gather(-1, tokens_M[:, None]).squeeze(-1)


def entropy(log_softmax_MV: torch.Tensor) -> torch.Tensor:
    """Entropy of the tempered distribution, [M]: -Σ p log p. A token of probability 0 contributes 0."""
    probability_MV = log_softmax_MV.exp()
    finite_MV = torch.where(probability_MV > 0, log_softmax_MV, torch.zeros_like(log_softmax_MV))
    return -(probability_MV * finite_MV).sum(-1)


class Predicted(NamedTuple):
    """`logprobs` [m] of the tokens, `entropy` [P] of the predictions (0 where it was not asked for)."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


def predicted_logprobs(
    logits_PV: torch.Tensor,
    temperature_P: torch.Tensor,
    tokens_m: torch.Tensor,
    prediction_m: torch.Tensor,
    *,
    chunk: int,
    with_entropy: bool = True,
) -> Predicted:
    """Log-probabilities of tokens at the tempered predictions `prediction_m` (ascending), in fp32 or wider.

    `chunk` predictions are turned into probabilities at once, in the backward pass too, so that nothing but the logits
    and their gradient has the size of the logits. It changes no number: rows are independent.
    """
    apply: Any = _Predicted.apply
    found = apply(logits_PV, temperature_P, tokens_m, prediction_m, chunk, with_entropy)
    return Predicted(*cast("tuple[torch.Tensor, torch.Tensor]", found))


class _Predicted(torch.autograd.Function):
    """With p = softmax(z / T): ∂log p_t / ∂z = (1_t - p) / T and ∂H / ∂z = -p·(log p + H) / T."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: torch.Tensor,
        temperature_P: torch.Tensor,
        tokens_m: torch.Tensor,
        prediction_m: torch.Tensor,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(logits_PV.dtype, torch.float32)
        logprobs_m = torch.zeros(len(tokens_m), dtype=wide, device=logits_PV.device)
        entropy_P = torch.zeros(len(logits_PV), dtype=wide, device=logits_PV.device)
        for part, tokens in _chunks(len(logits_PV), prediction_m, chunk):
            log_p_CV = tempered_log_softmax(logits_PV[part], temperature_P[part])
            logprobs_m[tokens] = log_p_CV[prediction_m[tokens] - part.start, tokens_m[tokens]]
            if with_entropy:
                entropy_P[part] = entropy(log_p_CV)
        ctx.save_for_backward(logits_PV, temperature_P, tokens_m, prediction_m, entropy_P)
        ctx.chunk = chunk
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_P)
        ctx.set_materialize_grads(False)
        return logprobs_m, entropy_P

    @staticmethod
    def backward(
        ctx: Any, logprob_gradient_m: torch.Tensor | None, entropy_gradient_P: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits_PV, temperature_P, tokens_m, prediction_m, entropy_P = ctx.saved_tensors
        gradient_PV = torch.empty_like(logits_PV)
        for part, tokens in _chunks(len(logits_PV), prediction_m, ctx.chunk):
            log_p_CV = tempered_log_softmax(logits_PV[part], temperature_P[part])
            gradient_CV = torch.zeros_like(log_p_CV)
            if entropy_gradient_P is not None:
                gradient_CV -= _entropy_gradient(log_p_CV, entropy_P[part]) * entropy_gradient_P[part, None]
            if logprob_gradient_m is not None:
                _add_logprob_gradient(
                    gradient_CV,
                    log_p_CV,
                    prediction_m[tokens] - part.start,
                    tokens_m[tokens],
                    logprob_gradient_m[tokens],
                )
            gradient_PV[part] = gradient_CV / temperature_P[part, None].to(gradient_CV.dtype)
        return gradient_PV, None, None, None, None, None


def _chunks(n_predictions: int, prediction_m: torch.Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Predictions and the tokens that read them, a chunk at a time."""
    edges = [*range(0, n_predictions, chunk), n_predictions]
    bounds = torch.searchsorted(prediction_m, torch.tensor(edges, device=prediction_m.device)).tolist()
    for i in range(len(edges) - 1):
        yield slice(edges[i], edges[i + 1]), slice(bounds[i], bounds[i + 1])


def _entropy_gradient(log_p_CV: torch.Tensor, entropy_C: torch.Tensor) -> torch.Tensor:
    """p·(log p + H), [C, V]; 0 where p is 0."""
    p_CV = log_p_CV.exp()
    return torch.where(p_CV > 0, p_CV * (log_p_CV + entropy_C[:, None]), 0)


def _add_logprob_gradient(
    gradient_CV: torch.Tensor,
    log_p_CV: torch.Tensor,
    row_m: torch.Tensor,
    tokens_m: torch.Tensor,
    logprob_gradient_m: torch.Tensor,
) -> None:
    """Add g·(1_t - p) of each token to its row."""
    total_C = gradient_CV.new_zeros(len(gradient_CV)).index_add_(0, row_m, logprob_gradient_m)
    gradient_CV -= log_p_CV.exp() * total_C[:, None]
    gradient_CV.index_put_((row_m, tokens_m), logprob_gradient_m, accumulate=True)
