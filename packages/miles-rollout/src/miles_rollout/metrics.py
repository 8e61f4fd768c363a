"""Numbers about rewards and rollouts. `reward_norm` is for metrics only: the trainer normalises what it trains on."""

from __future__ import annotations

import hashlib
import math
import statistics as stats
from collections.abc import Sequence

STD_EPSILON = 1e-6


def reward_norm(rewards: Sequence[float], *, std: bool) -> list[float]:
    """Rewards of one group minus their mean, with `std` divided by (unbiased standard deviation + 1e-6).

    Equal rewards and a single member give zeros.
    """
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    spread = stats.stdev(rewards) if std and len(rewards) > 1 else 0.0
    return [value / (spread + STD_EPSILON) for value in centred] if spread else centred


def pass_at_k(n: int, correct: int) -> dict[str, float]:
    """`pass@k` for the powers of two up to n: 1 - C(n - correct, k) / C(n, k) (Chen et al., 2021, equation 1)."""
    powers = (2**exponent for exponent in range(n.bit_length()))
    return {f"pass@{k}": 1.0 - math.comb(n - correct, k) / math.comb(n, k) for k in powers}


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, maximum and minimum, as every distribution is reported."""
    return {"mean": stats.fmean(values), "median": stats.median(values), "max": max(values), "min": min(values)}


def routed_experts_bytes(*, tokens: int, layers: int, top_k: int, itemsize: int = 4) -> int:
    """Size of the routed experts of one trajectory: a row for every token but the last."""
    return max(0, tokens - 1) * layers * top_k * itemsize


def deterministic_random(tokens: Sequence[int], response: str) -> int:
    """A coin that always falls the same way: the first byte of SHA-256 of str(tokens) + response, modulo 2."""
    return hashlib.sha256(f"{list(tokens)}{response}".encode()).digest()[0] % 2
