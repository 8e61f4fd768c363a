"""The record digest: one digest a turn over what an engine consumed and produced.

Byte order: `contracts/README.md`. Shapes: R expert rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

Span = tuple[int, int]
"""(start, version): the version holds from `start` to the next span."""


@dataclass(frozen=True, slots=True)
class Record:
    """One turn: ids as received, ids and log-probabilities as produced, versions, experts int32[R, L, K]."""

    input_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: ArrayLike
    version_spans: Sequence[Span]
    experts: NDArray[np.int32] | None = None
    expert_row_start: int = 0
    expert_version_spans: Sequence[Span] = ()


def record_digest(record: Record) -> str:
    """Return the 32 lower-case hex digits of `meta_info.record_digest`."""
    hasher = xxhash.xxh3_128(b"MRD1")
    hasher.update(_counted_ids(record.input_ids))
    hasher.update(_counted_ids(record.output_ids))
    hasher.update(np.asarray(record.logprobs, dtype="<f4").tobytes())
    hasher.update(_spans(record.version_spans))
    hasher.update(_expert_bytes(record))
    return hasher.hexdigest()


def expert_digest(record: Record) -> str | None:
    """Return `meta_info.expert_digest`, or None when the record holds no experts."""
    if record.experts is None:
        return None
    hasher = xxhash.xxh3_128(b"MED1")
    hasher.update(_expert_bytes(record))
    return hasher.hexdigest()


def _counted_ids(ids: Sequence[int]) -> bytes:
    return struct.pack("<I", len(ids)) + np.asarray(ids, dtype="<i4").tobytes()


def _spans(spans: Sequence[Span]) -> bytes:
    return struct.pack("<I", len(spans)) + np.asarray(spans, dtype="<i8").tobytes()


def _expert_bytes(record: Record) -> bytes:
    if record.experts is None:
        return struct.pack("<4I", 0, 0, 0, 0) + _spans(())
    n_rows, layers, top_k = record.experts.shape
    head = struct.pack("<4I", record.expert_row_start, n_rows, layers, top_k)
    return head + record.experts.astype("<i4").tobytes() + _spans(record.expert_version_spans)
