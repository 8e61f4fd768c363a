"""Which tokens each KV row holds, and which prefix of a new request is already computed. Torch-free.

A row belongs to a running request (held) or rests (idle) as prefix cache, least recently used first out. A prefix is
matched only under the same key: (extra key of the request, weight version that computed it), and only as far as it was
computed with the routes that the request would be given. A row whose keys and values stem from more than one version
has no key and is never matched.

Shapes: R rows, S positions, n appended positions, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_rollout.local.routes import RouteLayout, Routes, routes_agree

CacheKey = tuple[str | None, int]
"""(extra key, weight version)."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A row given to a request: its first `reused` tokens are computed, once copied from `copy_from` if that is set."""

    row: int
    reused: int
    copy_from: int | None


class RowTable:
    """Tokens, routes, keys and use of every KV row.

    `route_versions_RS` names the weights that chose the routes: older than the row's key where they were repeated.
    """

    def __init__(self, rows: int, max_len: int, layout: RouteLayout) -> None:
        self.tokens_RS: NDArray[np.int32] = np.zeros((rows, max_len), dtype=np.int32)
        self.routes_RSLK = np.zeros((rows, max_len, len(layout.layers), layout.top_k), dtype=layout.dtype)
        self.route_versions_RS: NDArray[np.int64] = np.zeros((rows, max_len), dtype=np.int64)
        self.length_R: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._keys: list[CacheKey | None] = [None] * rows
        self._held: list[bool] = [False] * rows
        self._last_used: list[int] = [0] * rows
        self._clock = 0

    @property
    def held_rows(self) -> int:
        return sum(self._held)

    @property
    def cached_tokens(self) -> int:
        """Tokens in all rows, held and idle."""
        return int(self.length_R.sum())

    def match(self, ids: NDArray[np.int32], key: CacheKey, limit: int, routes: Routes | None = None) -> tuple[int, int]:
        """Return (row, tokens) of the longest computed prefix of `ids[:limit]` under `key`; (-1, 0) without one.

        `routes` are those that the request has recorded so far.
        """
        rows = [row for row, row_key in enumerate(self._keys) if row_key == key and self.length_R[row] > 0]
        if not rows or limit <= 0:
            return -1, 0
        differs = self.tokens_RS[rows, :limit] != ids[:limit]
        agree = np.where(differs.any(axis=1), differs.argmax(axis=1), limit)
        shared = np.minimum(agree, self.length_R[rows])
        shared = np.minimum(shared, self._routed_alike(rows, int(shared.max()), key[1], routes))
        best = max(range(len(rows)), key=lambda i: (shared[i], self._extends(rows[i], int(shared[i]))))
        return (rows[best], int(shared[best])) if shared[best] > 0 else (-1, 0)

    def acquire(self, ids: NDArray[np.int32], key: CacheKey, limit: int, routes: Routes | None = None) -> Lease:
        """Give the request a row. A whole idle prefix is continued in place, any other is copied to another row."""
        source, shared = self.match(ids, key, limit, routes)
        if source >= 0 and self._extends(source, shared):
            return self._hold(Lease(source, shared, None), ids, key)
        row = self._victim(source)
        lease = Lease(row, shared, None if source in (-1, row) else source)
        return self._hold(lease, ids, key)

    def extend(
        self,
        row: int,
        ids: NDArray[np.int32],
        routes_nLK: NDArray[np.integer[Any]],
        route_versions_n: NDArray[np.int64],
    ) -> None:
        """Record that the keys and values of `ids` were appended to `row`, and the routes they were computed with."""
        start = int(self.length_R[row])
        span = slice(start, start + len(ids))
        self.tokens_RS[row, span] = ids
        self.routes_RSLK[row, span] = routes_nLK
        self.route_versions_RS[row, span] = route_versions_n
        self.length_R[row] = span.stop

    def release(self, row: int) -> None:
        """Let a row rest as prefix cache, or empty it when it has no key."""
        self._held[row] = False
        self._last_used[row] = self._tick()
        if self._keys[row] is None:
            self.length_R[row] = 0

    def drop(self, row: int) -> None:
        """Release a row whose contents are not to be trusted."""
        self._keys[row] = None
        self.release(row)

    def flush(self) -> None:
        """Empty every idle row."""
        for row, held in enumerate(self._held):
            if not held:
                self._keys[row] = None
                self.length_R[row] = 0

    def start_version(self, version: int) -> None:
        """Held rows go on under `version`: what they hold already makes them mixed. Idle ones can never match again."""
        self.flush()
        for row, held in enumerate(self._held):
            key = self._keys[row]
            if held and key is not None:
                self._keys[row] = None if self.length_R[row] else (key[0], version)

    def _routed_alike(self, rows: list[int], n: int, version: int, routes: Routes | None) -> NDArray[np.int64]:
        """Return for each row how many of its first `n` positions were computed with the request's routes."""
        agrees = routes_agree(routes, self.routes_RSLK[rows, :n], self.route_versions_RS[rows, :n], version)
        return np.where(agrees.all(axis=1), n, agrees.argmin(axis=1)) if n else np.zeros(len(rows), dtype=np.int64)

    def _extends(self, row: int, shared: int) -> bool:
        return not self._held[row] and shared == self.length_R[row]

    def _victim(self, source: int) -> int:
        idle = [row for row, held in enumerate(self._held) if not held]
        empty = [row for row in idle if not self.length_R[row]]
        if empty:
            return empty[0]
        others: Sequence[int] = [row for row in idle if row != source] or idle
        return min(others, key=lambda row: self._last_used[row])

    def _hold(self, lease: Lease, ids: NDArray[np.int32], key: CacheKey) -> Lease:
        row = lease.row
        self._held[row] = True
        self._last_used[row] = self._tick()
        if lease.copy_from is not None:
            self._last_used[lease.copy_from] = self._tick()
            self._copy_routes(lease.copy_from, row, lease.reused)
        self._keys[row] = key
        self.tokens_RS[row, : lease.reused] = ids[: lease.reused]
        self.length_R[row] = lease.reused
        return lease

    def _copy_routes(self, source: int, row: int, n: int) -> None:
        self.routes_RSLK[row, :n] = self.routes_RSLK[source, :n]
        self.route_versions_RS[row, :n] = self.route_versions_RS[source, :n]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
