"""Drawing one token a row, and the log-probability of what was drawn.

The log-probability is fp32 `log_softmax(logits / T)` of the drawn id before top-p and top-k (T = 1 when greedy). The
draw itself inverts the cumulative distribution in fp64 at one uniform number; number `k` of a request is a function of
its seed and `k` only (Philox, key = seed, counter = k), so neighbours, pauses and recomputation do not change it.

top-k keeps the k most probable ids, top-p those whose more probable ids together do not exceed p (SGLang's joint rule).

Shapes: M rows to sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled: `index` counts the draws of the request, `seed` is its own."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    index: int


def uniform(seed: int, index: int) -> float:
    """Return draw `index` of the stream `seed`: uniform in [0, 1), a multiple of 2**-53."""
    bits = np.random.Philox(key=seed, counter=index).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def sample(logits_MV: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Return an id and its log-probability for each row of `logits_MV`."""
    temperature_M1 = torch.tensor([d.temperature or 1.0 for d in draws], dtype=torch.float32)[:, None]
    logprobs_MV = torch.log_softmax(logits_MV.float() / temperature_M1, dim=-1)
    ids = [
        int(row_V.argmax()) if d.temperature == 0 else _draw(row_V, d)
        for row_V, d in zip(logprobs_MV, draws, strict=True)
    ]
    picked = logprobs_MV.gather(1, torch.tensor(ids)[:, None])[:, 0]
    return ids, [float(x) for x in picked.tolist()]


def token_logprobs(logits_MV: torch.Tensor, ids: Sequence[int]) -> list[float]:
    """Return log_softmax(logits) of `ids`, one a row, at temperature 1."""
    logprobs_MV = torch.log_softmax(logits_MV.float(), dim=-1)
    picked = logprobs_MV.gather(1, torch.tensor(list(ids))[:, None])[:, 0]
    return [float(x) for x in picked.tolist()]


def _draw(logprobs_V: torch.Tensor, draw: Draw) -> int:
    probs_V = logprobs_V.double().exp()
    if draw.top_p < 1.0 or 0 < draw.top_k < len(probs_V):
        probs_V = _truncated(probs_V, draw.top_p, draw.top_k)
    cumulative_V = probs_V.cumsum(0)
    point = uniform(draw.seed, draw.index) * float(cumulative_V[-1])
    drawn = int(torch.searchsorted(cumulative_V, point, right=True))
    return drawn if drawn < len(probs_V) else int(probs_V.nonzero()[-1])


def _truncated(probs_V: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    keep_V = sorted_V.cumsum(0) - sorted_V <= top_p
    if top_k > 0:
        keep_V[top_k:] = False
    return torch.zeros_like(probs_V).scatter_(0, order_V, torch.where(keep_V, sorted_V, 0.0))
