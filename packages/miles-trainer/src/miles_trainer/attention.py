"""Attention over packed sequences that share prefixes, plugged into transformers by name.

The segments and the numerics travel as keyword arguments of the model call, so nothing global changes between calls. No
mask over the packed row is built: transformers makes none for a name it has no mask function for, and each segment
attends to the tokens of its own path alone.

Shapes: N packed tokens, Q tokens of a segment, S tokens of its path up to its end, H query heads, G key/value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from miles_trainer.errors import ModelError
from miles_trainer.packing import Segment
from miles_trainer.protocols import Numerics

ATTENTION_NAME = "miles_trainer_packed"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


def packed_attention(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1GND: torch.Tensor,
    value_1GND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Sequence[Segment] = (),
    numerics: Numerics | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention along each path; returns [1, N, H, D]. Signature of transformers' attention functions.

    Without `segments` the row is one sequence. Raises ModelError when the model asks for a feature that would change
    the result and is not here.
    """
    _refuse(features)
    scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
    tiling = segments or (Segment(0, query_1HND.shape[2]),)
    packed = query_1HND[0], key_1GND[0], value_1GND[0]
    if torch.is_grad_enabled() and any(segment.parent is not None for segment in tiling):
        # The keys along a path repeat those that are shared. Made again in the backward pass, they cost the memory of
        # one layer; kept, a prompt would be held once for each sample of it in every layer.
        output_NHD = checkpoint(
            _attend_all, *packed, tiling, scale, numerics, use_reentrant=False, preserve_rng_state=False
        )
    else:
        output_NHD = _attend_all(*packed, tiling, scale, numerics)
    return output_NHD[None], None


def _refuse(features: Mapping[str, Any]) -> None:
    wanted = [name for name in UNSUPPORTED if features.get(name) is not None]
    if wanted:
        raise ModelError(f"the model's attention uses {', '.join(wanted)}, which this release does not have")


def _attend_all(
    query_HND: torch.Tensor,
    key_GND: torch.Tensor,
    value_GND: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
    numerics: Numerics | None,
) -> torch.Tensor:
    """Every segment in order, [N, H, D]."""
    sizes = [segment.stop - segment.start for segment in segments]
    queries = torch.split(query_HND, sizes, dim=1)
    keys, values = (_along_paths(torch.split(x, sizes, dim=1), segments) for x in (key_GND, value_GND))
    outputs = [
        _attend(query_HQD, key_GSD, value_GSD, segment.first_position, scale, numerics)
        for segment, query_HQD, key_GSD, value_GSD in zip(segments, queries, keys, values, strict=True)
    ]
    return torch.cat(outputs)


def _along_paths(parts: Sequence[torch.Tensor], segments: Sequence[Segment]) -> list[torch.Tensor]:
    """Each segment's own rows after those of its ancestors, [G, S, D]."""
    paths: list[torch.Tensor] = []
    for segment, own_GQD in zip(segments, parts, strict=True):
        paths.append(own_GQD if segment.parent is None else torch.cat([paths[segment.parent], own_GQD], dim=1))
    return paths


def _attend(
    query_HQD: torch.Tensor,
    key_GSD: torch.Tensor,
    value_GSD: torch.Tensor,
    first_position: int,
    scale: float,
    numerics: Numerics | None,
) -> torch.Tensor:
    """One segment, [Q, H, D]: query i stands at `first_position` + i of its path."""
    if numerics is not None:
        query_QHD, key_SGD, value_SGD = (x.transpose(0, 1) for x in (query_HQD, key_GSD, value_GSD))
        return numerics.attend(query_QHD, key_SGD, value_SGD, first_position, scale)
    output_1HQD = torch.nn.functional.scaled_dot_product_attention(
        query_HQD[None],
        key_GSD[None],
        value_GSD[None],
        attn_mask=_visible(query_HQD.shape[1], first_position, query_HQD.device) if first_position else None,
        is_causal=not first_position,
        scale=scale,
        enable_gqa=True,
    )
    return output_1HQD[0].transpose(0, 1)


def _visible(n_queries: int, first_position: int, device: torch.device) -> torch.Tensor:
    """bool [Q, S]: keys up to each query's own position. torch's `is_causal` would align it to the first key."""
    positions_Q = torch.arange(first_position, first_position + n_queries, device=device)
    return torch.arange(first_position + n_queries, device=device) <= positions_Q[:, None]


AttentionInterface.register(ATTENTION_NAME, packed_attention)
