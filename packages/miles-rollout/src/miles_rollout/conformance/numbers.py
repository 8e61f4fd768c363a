"""Single values: normalisation, pass@k, orders, sizes, hashes, addresses, slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles_rollout.config import WorkerConfig
from miles_rollout.conformance.compare import NotBuiltError, expect_equal
from miles_rollout.data.files import split_slice
from miles_rollout.data.source import epoch_order
from miles_rollout.metrics import deterministic_random, pass_at_k, reward_norm, routed_experts_bytes, statistics
from miles_rollout.router.fleet import base_urls


def check_number(vector: Mapping[str, Any]) -> None:
    """Raise AssertionError unless the value of this kind is the expected one within the vector's tolerance."""
    kind = vector["kind"]
    if kind not in _KINDS:
        raise NotBuiltError(f"kind {kind!r}")
    expect_equal(kind, _KINDS[kind](**vector["input"]), vector["expected"], tolerance=vector["tol"])


def _max_in_flight_groups(
    async_max_concurrent_samples: int | None, rollout_batch_size: int, n_samples_per_prompt: int
) -> int:
    config = WorkerConfig(
        batch_groups=rollout_batch_size,
        group_size=n_samples_per_prompt,
        max_concurrent_samples=async_max_concurrent_samples,
    )
    return config.in_flight_groups


def _prompt_slice(path: str, rows: int) -> list[int]:
    return list(range(rows))[split_slice(path)[1]]


_KINDS: dict[str, Callable[..., Any]] = {
    "reward_norm": lambda rewards, std: reward_norm(rewards, std=std),
    "pass_at_k": lambda n, correct: pass_at_k(n, correct),
    "statistics": lambda values: statistics(values),
    "epoch_order": lambda seed, epoch, size: epoch_order(seed, epoch, size),
    "r3_bytes": lambda tokens, layers, topk: routed_experts_bytes(tokens=tokens, layers=layers, top_k=topk),
    "max_in_flight_groups": _max_in_flight_groups,
    "deterministic_random": lambda tokens, response: deterministic_random(tokens, response),
    "router_worker_base_urls": lambda urls: base_urls(urls),
    "prompt_slice": _prompt_slice,
}
