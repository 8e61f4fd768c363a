"""Records of routed experts as arrays (spec 4.1, 4.2).

The dense form is int32 [rows, layers, top_k]; a hole is a whole row of -1. It exists inside a batch only: trajectories
store the rows they have and spans of those they lack.

Shapes: T tokens, R rows, L layers, K experts a token.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_trainer.errors import ReplayError
from miles_trainer.sample import RoutedExperts

RoutesRLK = NDArray[np.int32]

HOLE = -1


def decode_routed(text: str, *, num_layers: int, rows: int) -> RoutesRLK:
    """Strict base64 of little-endian int32 → [rows, num_layers, top_k], top_k from the length.

    Raises ReplayError `base64` (alphabet or padding) or `shape` (length).
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ReplayError("base64", f"expert rows are not strict base64: {error}") from error
    cells = rows * num_layers
    if cells == 0:
        if data:
            raise ReplayError("shape", f"{len(data)} bytes of expert rows where there are {rows} rows")
        return np.zeros((0, num_layers, 0), dtype=np.int32)
    if not data or len(data) % (4 * cells):
        raise ReplayError("shape", f"{len(data)} bytes do not divide into {rows} rows of {num_layers} layers of int32")
    return np.frombuffer(data, dtype="<i4").astype(np.int32).reshape(rows, num_layers, -1)


def wire_dtype(num_experts: int, *, has_padding: bool = False) -> str:
    """Smallest dtype name that holds the expert ids; an array with -1 travels as int32."""
    if has_padding or num_experts > 65536:
        return "int32"
    return "uint8" if num_experts <= 256 else "uint16"


def validate_routed(
    routed: Sequence[Any] | NDArray[np.integer], *, tokens: int, num_experts: int, num_layers: int, top_k: int
) -> RoutesRLK:
    """Check a sample's rows and return them as [tokens - 1, num_layers, top_k].

    Raises ReplayError `rows`, `layers`, `top_k`, `index` (outside -1 … experts - 1, or -1 in part of a row),
    `duplicate`.
    """
    if len(routed) != max(tokens - 1, 0):
        raise ReplayError("rows", f"{len(routed)} expert rows for {tokens} tokens: there is one less than tokens")
    regular = isinstance(routed, np.ndarray) and routed.ndim == 3
    samples = routed[:1] if regular else routed  # an array's rows all have the shape of its first
    if any(len(row) != num_layers for row in samples):
        raise ReplayError("layers", f"an expert row does not have the {num_layers} layers of the model")
    if any(len(cell) != top_k for row in samples for cell in row):
        raise ReplayError("top_k", f"an expert row does not name {top_k} experts in each layer")
    array = np.asarray(routed, dtype=np.int64).reshape(-1, num_layers, top_k)
    hole = array == HOLE
    if (array < HOLE).any() or (array >= num_experts).any() or (hole.any(-1) != hole.all(-1)).any():
        raise ReplayError("index", f"expert ids must lie in 0 … {num_experts - 1}, or be -1 in a whole row")
    ordered = np.sort(array, axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & ~hole[..., 1:]).any():
        raise ReplayError("duplicate", "an expert row names an expert twice in one layer")
    return array.astype(np.int32)


def dense_rows(routes: RoutedExperts, tokens: int) -> RoutesRLK:
    """A trajectory's rows → [tokens, L, K] with holes at missing spans and at the last token, which is never routed.

    Raises ReplayError when rows and spans do not make up the tokens - 1 positions, or an id does not fit.
    """
    dense = np.full((tokens, len(routes.layers), routes.top_k), HOLE, dtype=np.int32)
    present = _present_rows(routes.missing_spans, max(tokens - 1, 0))
    rows, needed = np.asarray(routes.rows), (int(present.sum()), len(routes.layers), routes.top_k)
    if rows.shape != needed:
        raise ReplayError("rows", f"rows of shape {rows.shape}, but positions, layers and top-k need {needed}")
    if rows.size and (rows.min() < 0 or rows.max() >= routes.num_experts):
        raise ReplayError("index", f"expert ids {rows.min()} … {rows.max()} must lie in 0 … {routes.num_experts - 1}")
    dense[: tokens - 1][present] = rows
    validate_routed(
        dense[: tokens - 1],
        tokens=tokens,
        num_experts=routes.num_experts,
        num_layers=len(routes.layers),
        top_k=routes.top_k,
    )
    return dense


def _present_rows(missing_spans: Sequence[tuple[int, int]], rows: int) -> NDArray[np.bool_]:
    present = np.ones(rows, dtype=bool)
    for start, count in missing_spans:
        if start < 0 or count < 1 or start + count > rows or not present[start : start + count].all():
            raise ReplayError("rows", f"missing span {start}+{count} does not fit {rows} rows or meets another span")
        present[start : start + count] = False
    return present


def expand_layers(
    rows: Sequence[Any] | NDArray[np.integer], *, num_layers: int, moe_layers: Sequence[int]
) -> RoutesRLK:
    """Rows over routed layers only → over all layers, dense ones -1. Raises ReplayError `layers`."""
    array = np.asarray(rows, dtype=np.int32)
    if array.ndim != 3 or array.shape[1] != len(moe_layers):
        raise ReplayError("layers", f"rows of shape {array.shape} do not have the {len(moe_layers)} routed layers")
    result = np.full((array.shape[0], num_layers, array.shape[2]), HOLE, dtype=np.int32)
    result[:, list(moe_layers)] = array
    return result


def join_records(records: Sequence[Mapping[str, Any]], *, tokens: int) -> RoutesRLK:
    """Incremental records {start, n_rows, rows} → the tokens - 1 rows; what lies beyond is cut.

    Raises ReplayError `contiguity`, `payload` or `rows`.
    """
    parts: list[RoutesRLK] = []
    end = 0
    for record in records:
        start, n_rows, rows = record["start"], record["n_rows"], record["rows"]
        if start != end:
            raise ReplayError("contiguity", f"a record starts at row {start} where the last one ended at {end}")
        if (rows is None) != (n_rows == 0) or (rows is not None and len(rows) != n_rows):
            raise ReplayError("payload", f"a record of {n_rows} rows carries {'none' if rows is None else len(rows)}")
        if rows is not None:
            parts.append(np.asarray(rows, dtype=np.int32))
        end += n_rows
    if end < tokens - 1:
        raise ReplayError("rows", f"{end} expert rows for {tokens} tokens: {tokens - 1} are needed")
    return np.concatenate(parts)[: max(tokens - 1, 0)] if parts else np.zeros((0, 0, 0), dtype=np.int32)
