"""Attention over packed sequences, plugged into transformers by name.

The bounds of the sequences and the numerics travel as keyword arguments of the model call, so nothing global changes
between calls. No mask is built: transformers makes none for a name it has no mask function for, and each segment is
causal by itself.

Shapes: N packed tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface

from miles_trainer.errors import ModelError
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
    segment_bounds: Sequence[int] = (),
    numerics: Numerics | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment; returns [1, N, H, D]. Signature of transformers' attention functions.

    Raises ModelError when the model asks for a feature that would change the result and is not here.
    """
    _refuse(features)
    scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
    bounds = list(segment_bounds) or [0, query_1HND.shape[2]]
    outputs = [
        _attend(query_1HND[0, :, a:b], key_1GND[0, :, a:b], value_1GND[0, :, a:b], scale, numerics)
        for a, b in pairwise(bounds)
    ]
    return torch.cat(outputs)[None], None


def _refuse(features: Mapping[str, Any]) -> None:
    wanted = [name for name in UNSUPPORTED if features.get(name) is not None]
    if wanted:
        raise ModelError(f"the model's attention uses {', '.join(wanted)}, which this release does not have")


def _attend(
    query_HLD: torch.Tensor, key_GLD: torch.Tensor, value_GLD: torch.Tensor, scale: float, numerics: Numerics | None
) -> torch.Tensor:
    """One sequence of L tokens, [L, H, D]."""
    if numerics is not None:
        query_LHD, key_LGD, value_LGD = (x.transpose(0, 1) for x in (query_HLD, key_GLD, value_GLD))
        return numerics.attend(query_LHD, key_LGD, value_LGD, 0, scale)
    output_1HLD = torch.nn.functional.scaled_dot_product_attention(
        query_HLD[None], key_GLD[None], value_GLD[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return output_1HLD[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
