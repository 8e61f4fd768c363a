"""Attention over KV rows, plugged into unmodified transformers models.

All requests of a step lie in one packed row of N tokens: first the segments of one token, sorted by KV row, then longer
ones. New keys and values are scattered into the rows; then one SDPA runs over each stretch of adjacent rows, as a view,
and one over each longer segment. transformers builds no mask for an attention name its mask registry does not know.

Shapes: N packed tokens, H query heads, G key/value heads, J query heads per key/value head (H = G * J), S positions,
D head size, B adjacent rows, Q tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.kv import KVRows
from miles_rollout.protocols import Numerics

ATTENTION_NAME = "miles_rollout_rows"
CONTEXT_KWARG = "miles_rollout_step"
_UNSUPPORTED_KWARGS = ("sliding_window", "softcap", "s_aux")


@dataclass(frozen=True, slots=True)
class RowSegment:
    """`count` new tokens of the request in `row`, the first at position `start`."""

    row: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class SingleRun:
    """One new token in each of B adjacent rows. `mask_B11S` is None when all rows are equally long."""

    offset: int
    first_row: int
    rows: int
    end: int
    mask_B11S: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment of several tokens. `mask_QS` is None when it starts at position 0 (plainly causal)."""

    offset: int
    segment: RowSegment
    mask_QS: torch.Tensor | None


@dataclass(slots=True)
class StepContext:
    """What the attention of one forward needs; travels through `model(...)` as a keyword argument."""

    kv: KVRows
    segments: tuple[RowSegment, ...]
    row_N: torch.Tensor
    position_N: torch.Tensor
    runs: tuple[SingleRun, ...]
    stretches: tuple[Stretch, ...]
    numerics: Numerics | None
    layers_seen: list[int] = field(default_factory=list)


def step_context(kv: KVRows, segments: Sequence[RowSegment], numerics: Numerics | None) -> StepContext:
    """Prepare the masks and indices that all layers share."""
    row_N = torch.tensor([s.row for s in segments for _ in range(s.count)])
    position_N = torch.tensor([p for s in segments for p in range(s.start, s.end)])
    runs, stretches = ((), ()) if numerics is not None else (_single_runs(segments), _stretches(segments))
    return StepContext(kv, tuple(segments), row_N, position_N, runs, stretches, numerics)


def _single_runs(segments: Sequence[RowSegment]) -> tuple[SingleRun, ...]:
    singles = [s for s in segments if s.count == 1]
    runs: list[SingleRun] = []
    begin = 0
    for i in range(1, len(singles) + 1):
        if i == len(singles) or singles[i].row != singles[i - 1].row + 1:
            runs.append(_single_run(begin, singles[begin:i]))
            begin = i
    return tuple(runs)


def _single_run(offset: int, singles: Sequence[RowSegment]) -> SingleRun:
    ends = [s.end for s in singles]
    longest = max(ends)
    mask = None
    if min(ends) < longest:
        mask = (torch.arange(longest) < torch.tensor(ends)[:, None])[:, None, None, :]
    return SingleRun(offset, singles[0].row, len(singles), longest, mask)


def _stretches(segments: Sequence[RowSegment]) -> tuple[Stretch, ...]:
    stretches: list[Stretch] = []
    offset = 0
    for segment in segments:
        if segment.count > 1:
            stretches.append(Stretch(offset, segment, _causal_mask(segment)))
        offset += segment.count
    return tuple(stretches)


def _causal_mask(segment: RowSegment) -> torch.Tensor | None:
    if segment.start == 0:
        return None
    return torch.arange(segment.end) <= torch.arange(segment.start, segment.end)[:, None]


def rows_attention(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1GND: torch.Tensor,
    value_1GND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer. Returns [1, N, H, D]."""
    context: StepContext | None = kwargs.get(CONTEXT_KWARG)
    if context is None:
        raise EngineSetupError(f"attention {ATTENTION_NAME!r} was called outside the local engine")
    _refuse_variants(module, attention_mask, kwargs)
    layer = int(getattr(module, "layer_idx", -1))
    context.layers_seen.append(layer)
    keys, values = context.kv.keys[layer], context.kv.values[layer]
    keys[context.row_N, :, context.position_N] = key_1GND[0].transpose(0, 1)
    values[context.row_N, :, context.position_N] = value_1GND[0].transpose(0, 1)
    scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
    query_NHD = query_1HND[0].transpose(0, 1)
    attend = _attend_rows if context.numerics is None else _attend_with_numerics
    return attend(context, query_NHD, keys, values, scale)[None], None


def _refuse_variants(module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    found = [name for name in _UNSUPPORTED_KWARGS if kwargs.get(name) is not None]
    if attention_mask is not None:
        found.append("attention_mask")
    if found:
        raise EngineSetupError(
            f"{type(module).__name__} asks for {', '.join(found)}, which KV rows of full attention do not have: "
            "this model family is not served by the local engine",
            code="unsupported_model",
        )


def _attend_rows(
    context: StepContext, query_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    out_NHD = torch.empty_like(query_NHD)
    for run in context.runs:
        out_NHD[run.offset : run.offset + run.rows] = _attend_run(run, query_NHD, keys, values, scale)
    for stretch in context.stretches:
        span = slice(stretch.offset, stretch.offset + stretch.segment.count)
        out_NHD[span] = _attend_stretch(stretch, query_NHD[span], keys, values, scale)
    return out_NHD


def _attend_run(
    run: SingleRun, query_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """The J query heads of a key/value head stand in for query positions: no key or value is repeated."""
    heads, head_dim = query_NHD.shape[1:]
    kv_heads = keys.shape[1]
    query_BGJD = query_NHD[run.offset : run.offset + run.rows].reshape(run.rows, kv_heads, heads // kv_heads, head_dim)
    rows = slice(run.first_row, run.first_row + run.rows)
    out_BGJD = scaled_dot_product_attention(
        query_BGJD, keys[rows, :, : run.end], values[rows, :, : run.end], attn_mask=run.mask_B11S, scale=scale
    )
    return out_BGJD.reshape(run.rows, heads, head_dim)


def _attend_stretch(
    stretch: Stretch, query_QHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    row, end = stretch.segment.row, stretch.segment.end
    out_1HQD = scaled_dot_product_attention(
        query_QHD.transpose(0, 1)[None],
        keys[row : row + 1, :, :end],
        values[row : row + 1, :, :end],
        attn_mask=stretch.mask_QS,
        is_causal=stretch.mask_QS is None,
        scale=scale,
        enable_gqa=query_QHD.shape[1] != keys.shape[1],
    )
    return out_1HQD[0].transpose(0, 1)


def _attend_with_numerics(
    context: StepContext, query_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    assert context.numerics is not None
    out: list[torch.Tensor] = []
    offset = 0
    for s in context.segments:
        key_SGD, value_SGD = (rows[s.row, :, : s.end].transpose(0, 1) for rows in (keys, values))
        query_QHD = query_NHD[offset : offset + s.count]
        out.append(context.numerics.attend(query_QHD, key_SGD, value_SGD, s.start, scale))
        offset += s.count
    return torch.cat(out)


AttentionInterface.register(ATTENTION_NAME, rows_attention)
