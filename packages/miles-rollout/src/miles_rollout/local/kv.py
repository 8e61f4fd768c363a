"""Keys and values in contiguous rows.

Shapes: R rows, G key/value heads, S positions, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from miles_rollout.local.config import EngineConfig
from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.routes import RouteLayout
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


class KVRows:
    """Storage of all rows. `keys[layer]` and `values[layer]` are [R, G, S, D]."""

    def __init__(self, layout: KVLayout, routes: RouteLayout, rows: int, max_len: int) -> None:
        shape = (rows, layout.kv_heads, max_len, layout.head_dim)
        self.keys = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.layers)]
        self.values = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.layers)]
        self.table = RowTable(rows, max_len, routes)
        self.capacity_tokens = rows * max_len

    def prepare(self, lease: Lease) -> None:
        """Copy the shared prefix into a leased row."""
        if lease.copy_from is None or not lease.reused:
            return
        row, source, n = lease.row, lease.copy_from, lease.reused
        for rows in self._tensors():
            rows[row, :, :n].copy_(rows[source, :, :n])

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
