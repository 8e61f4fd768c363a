"""Log-probabilities and entropies at given positions (spec 1.2), in nats."""

from __future__ import annotations

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
