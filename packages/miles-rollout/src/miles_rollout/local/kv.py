"""Keys and values in contiguous rows, with the expert routes of each position beside them.

Shapes: R rows, G key/value heads, S positions, D head size, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from miles_rollout.local.config import EngineConfig
from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.rows import Lease, RowTable


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Keys and values of one token: `layers` pairs of `[kv_heads, head_dim]` in `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RouteLayout:
    """Experts of one token: `[layers, top_k]` of `num_experts`; no layers for a dense model."""

    layers: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16] | type[np.int32]:
        """Smallest type that holds an expert index."""
        if self.num_experts <= 1 << 8:
            return np.uint8
        return np.uint16 if self.num_experts <= 1 << 16 else np.int32


class KVRows:
    """Storage of all rows. `keys[layer]` and `values[layer]` are [R, G, S, D]."""

    def __init__(self, layout: KVLayout, routes: RouteLayout, rows: int, max_len: int) -> None:
        shape = (rows, layout.kv_heads, max_len, layout.head_dim)
        self.keys = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.layers)]
        self.values = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.layers)]
        self.routes_RSLK = np.zeros((rows, max_len, len(routes.layers), routes.top_k), dtype=routes.dtype)
        self.route_versions_RS: NDArray[np.int64] = np.zeros((rows, max_len), dtype=np.int64)
        self.table = RowTable(rows, max_len)
        self.capacity_tokens = rows * max_len

    def prepare(self, lease: Lease) -> None:
        """Copy the shared prefix into a leased row."""
        if lease.copy_from is None or not lease.reused:
            return
        row, source, n = lease.row, lease.copy_from, lease.reused
        for rows in self._tensors():
            rows[row, :, :n].copy_(rows[source, :, :n])
        self.routes_RSLK[row, :n] = self.routes_RSLK[source, :n]
        self.route_versions_RS[row, :n] = self.route_versions_RS[source, :n]

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self.keys
        yield from self.values


def plan_rows(layout: KVLayout, config: EngineConfig, max_context: int) -> int:
    """Return how many rows the budget pays for; raise `EngineSetupError` when it is fewer than may run at once."""
    row_bytes = layout.token_bytes * max_context
    rows = min(config.kv_budget_bytes // row_bytes, config.max_running + config.cache_rows)
    if rows < config.max_running:
        raise EngineSetupError(
            f"{config.max_running} running requests of {max_context} tokens need {config.max_running * row_bytes} "
            f"bytes of keys and values ({layout.token_bytes} a token); the budget is {config.kv_budget_bytes}: raise "
            "engine.kv_budget_bytes or lower engine.max_running or engine.max_context",
            code="kv_budget",
        )
    return int(rows)
