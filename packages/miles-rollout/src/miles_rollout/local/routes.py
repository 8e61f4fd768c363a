"""Routes of one request: which experts each position took, by whose choice, and what other rows must agree with.

A position that was routed once keeps its routes, also when it is computed again under other weights: the record of a
request then says what the engine used. Torch-free.

Shapes: T positions of a request, n consecutive positions, P positions of a prefix, R rows, L MoE layers, K experts per
token.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_rollout.local.errors import RequestError
from miles_rollout.records import Span

CARRIED = -1
"""Version of a position whose routes came with the request."""
HOLE = -1
"""Expert index of a position where the routers choose for themselves."""


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


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes of positions of one request, as they were first chosen or as the request brought them."""

    experts_TLK: NDArray[np.int32]
    versions_T: NDArray[np.int64]
    known_T: NDArray[np.bool_]

    @staticmethod
    def empty(tokens: int, layout: RouteLayout, prefix_PLK: NDArray[np.int32] | None = None) -> Routes:
        """Room for `tokens` positions, of which the first ones may be known already."""
        experts = np.zeros((tokens, len(layout.layers), layout.top_k), dtype=np.int32)
        routes = Routes(experts, np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.bool_))
        if prefix_PLK is not None:
            routes.fill(0, prefix_PLK, np.full(len(prefix_PLK), CARRIED, dtype=np.int64))
        return routes

    def fill(self, start: int, experts_nLK: NDArray[np.integer[Any]], versions_n: NDArray[np.int64]) -> None:
        """Record routes from position `start` on; a position that was routed before keeps what it has."""
        span = slice(start, start + len(experts_nLK))
        new_n = ~self.known_T[span]
        self.experts_TLK[span][new_n] = experts_nLK[new_n]
        self.versions_T[span][new_n] = versions_n[new_n]
        self.known_T[span] = True

    def recorded(self, start: int, end: int) -> NDArray[np.int32] | None:
        """What a pass over [start, end) must repeat, holes where nothing is known; None when nothing is."""
        known_n = self.known_T[start:end]
        if not known_n.any():
            return None
        return np.where(known_n[:, None, None], self.experts_TLK[start:end], np.int32(HOLE))

    def rows(self, start: int, end: int) -> NDArray[np.int32] | None:
        """Return rows [start, end), or None when some pass has not run yet."""
        if not self.known_T[start:end].all():
            return None
        return self.experts_TLK[start:end].copy()

    def version_spans(self, start: int, end: int) -> tuple[Span, ...]:
        return version_spans(self.versions_T[start:end])


def version_spans(versions: NDArray[np.int64]) -> tuple[Span, ...]:
    """Return (start, version) wherever the version changes."""
    if not len(versions):
        return ()
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    return tuple((start, int(versions[start])) for start in starts)


def routes_agree(
    routes: Routes | None,
    experts_RnLK: NDArray[np.integer[Any]],
    versions_Rn: NDArray[np.int64],
    version: int,
) -> NDArray[np.bool_]:
    """Return bool [R, n]: where keys and values of computed positions, the first n, may serve a request.

    Where the request knows its routes, they must have been computed with the same. Elsewhere the weights of `version`
    must have chosen: what another request was made to repeat is not what this one would be given.
    """
    own_Rn: NDArray[np.bool_] = np.equal(versions_Rn, version)
    if routes is None:
        return own_Rn
    n = versions_Rn.shape[1]
    same_Rn: NDArray[np.bool_] = (experts_RnLK == routes.experts_TLK[:n]).all(axis=(2, 3))
    agrees_Rn: NDArray[np.bool_] = np.where(routes.known_T[:n], same_Rn, own_Rn)
    return agrees_Rn


def shared_routes(routes: Routes | None, computing: Routes | None, version: int, limit: int) -> int:
    """Return how many of the first `limit` positions will serve a request once `computing` has computed them."""
    known_n = np.zeros(limit, dtype=np.bool_) if routes is None else routes.known_T[:limit]
    if computing is None:
        return leading(~known_n)
    settled_n, experts_nLK = computing.known_T[:limit], computing.experts_TLK[:limit]
    versions_n = np.where(settled_n, computing.versions_T[:limit], version)
    agrees_n = routes_agree(routes, experts_nLK[None], versions_n[None], version)[0]
    return leading(agrees_n & (settled_n | ~known_n))


def leading(agrees_n: NDArray[np.bool_]) -> int:
    """Return the length of the run of true values at the start."""
    return len(agrees_n) if agrees_n.all() else int(agrees_n.argmin())


def decode_routes(text: str, rows: int, layout: RouteLayout) -> NDArray[np.int32]:
    """Return int32 [rows, L, K] from base64 of little-endian int32. Raises `RequestError`."""
    shape = (max(rows, 0), len(layout.layers), layout.top_k)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refuse(f"it is not base64: {error}") from error
    expected = shape[0] * shape[1] * shape[2] * 4
    if len(data) != expected:
        raise _refuse(f"it holds {len(data)} bytes; {expected} make int32 {list(shape)}")
    return np.frombuffer(data, dtype="<i4").reshape(shape).astype(np.int32)


def check_prefix(prefix_PLK: NDArray[np.int32], rows: int, layout: RouteLayout) -> None:
    """Raise `RequestError` unless a carried prefix is int32 [rows, L, K] of distinct experts of the model."""
    shape = (rows, len(layout.layers), layout.top_k)
    if prefix_PLK.shape != shape or prefix_PLK.dtype != np.int32:
        raise _refuse(f"it is {prefix_PLK.dtype} {list(prefix_PLK.shape)}; int32 {list(shape)} was expected")
    if not prefix_PLK.size:
        return
    lowest, highest = int(prefix_PLK.min()), int(prefix_PLK.max())
    if lowest < 0 or highest >= layout.num_experts:
        bad = lowest if lowest < 0 else highest
        raise _refuse(f"it names expert {bad}; the model has 0 to {layout.num_experts - 1}")
    ordered = np.sort(prefix_PLK, axis=-1)
    twice = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(twice):
        row, layer = twice[0][:2]
        raise _refuse(f"row {row} names an expert twice in layer {layout.layers[layer]}")


def _refuse(what: str) -> RequestError:
    return RequestError(
        f"routed_experts_prefix is refused: {what}; send the rows [0, routed_experts_start_len) that the engine's "
        "replies gave",
        code="invalid_experts_prefix",
    )
