"""The numerics both sides are given."""

from __future__ import annotations

from miles.config import NumericsConfig
from miles.invariant import FixedBlocks


def numerics_of(config: NumericsConfig) -> FixedBlocks | None:
    """Fixed blocks in batch-invariant mode, else nothing: the packages then use their own, faster way."""
    if not config.batch_invariant:
        return None
    return FixedBlocks(max_context=config.max_context, block_rows=config.block_rows)
