"""The named ways to get a block's scale from its largest magnitude.

Each variant gives two float32 tensors for the same block: the decode scale that is stored (`number = code x scale`) and
the encode operand that the element is multiplied or divided by before the cast. The variants are those of public
quantisers, so that bits can be compared with theirs; where two variants differ only in the order of two roundings, that
order is the difference.

Every division has tensors on both sides on one device: a Python or CPU scalar divisor becomes a multiplication by
its reciprocal on some devices, which rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from miles_quant.casts import E4M3_MAX, next_power_of_two, previous_power_of_two

Variant = Literal["recip", "div", "te_f32", "te_pow2", "ue8m0", "cuda_v2", "cuda_v2_ue8m0", "dsv4_act"]

WEIGHT_VARIANTS: tuple[Variant, ...] = ("recip", "div", "te_f32", "te_pow2", "ue8m0")
ACTIVATION_VARIANTS: tuple[Variant, ...] = ("recip", "cuda_v2", "cuda_v2_ue8m0", "dsv4_act")

_FLOOR_FP32 = 1e-10
_FLOOR_UE8M0 = 1e-4


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales of blocks, float32, one an amax.

    Attributes:
        decode: stored scale.
        operand: what elements are multiplied with, or divided by, before the cast.
        divides: whether elements are divided by `operand`.
    """

    decode: torch.Tensor
    operand: torch.Tensor
    divides: bool = False

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Scale elements (float32, broadcast against the scales)."""
        return x / self.operand if self.divides else x * self.operand


def block_scales(variant: Variant, amax: torch.Tensor, source_dtype: torch.dtype) -> BlockScales:
    """Scales of `variant` for block maxima `amax` (float32, any shape) of a tensor of `source_dtype`."""
    return _RULES[variant](amax, source_dtype)


def _recip(amax: torch.Tensor, _: torch.dtype) -> BlockScales:
    scale = amax.clamp(min=_FLOOR_FP32) / amax.new_tensor(E4M3_MAX)
    return BlockScales(scale, amax.new_tensor(1.0) / scale)


def _div(amax: torch.Tensor, _: torch.dtype) -> BlockScales:
    scale = amax.clamp(min=_FLOOR_FP32) / amax.new_tensor(E4M3_MAX)
    return BlockScales(scale, scale, divides=True)


def _ue8m0(amax: torch.Tensor, _: torch.dtype) -> BlockScales:
    scale = next_power_of_two(amax.clamp(min=_FLOOR_UE8M0) / amax.new_tensor(E4M3_MAX))
    return BlockScales(scale, amax.new_tensor(1.0) / scale)


def _te_f32(amax: torch.Tensor, source_dtype: torch.dtype) -> BlockScales:
    encode = _te_encode_scale(amax, source_dtype)
    return BlockScales(amax.new_tensor(1.0) / encode, encode)


def _te_pow2(amax: torch.Tensor, source_dtype: torch.dtype) -> BlockScales:
    encode = previous_power_of_two(_te_encode_scale(amax, source_dtype))
    return BlockScales(amax.new_tensor(1.0) / encode, encode)


def _te_encode_scale(amax: torch.Tensor, source_dtype: torch.dtype) -> torch.Tensor:
    encode = amax.new_tensor(E4M3_MAX) / amax
    encode = torch.where(torch.isinf(encode), torch.finfo(source_dtype).max, encode)
    unusable = (amax == 0) | ~torch.isfinite(amax)
    return torch.where(unusable, 1.0, encode)


def _cuda_v2(amax: torch.Tensor, _: torch.dtype) -> BlockScales:
    floored = amax.clamp(min=_FLOOR_FP32)
    return BlockScales(_times_reciprocal_of_max(floored), amax.new_tensor(E4M3_MAX) / floored)


def _cuda_v2_ue8m0(amax: torch.Tensor, _: torch.dtype) -> BlockScales:
    scale = next_power_of_two(_times_reciprocal_of_max(amax.clamp(min=_FLOOR_FP32)))
    return BlockScales(scale, amax.new_tensor(1.0) / scale)


def _dsv4_act(amax: torch.Tensor, _: torch.dtype) -> BlockScales:
    scale = next_power_of_two(_times_reciprocal_of_max(amax.clamp(min=_FLOOR_UE8M0)))
    return BlockScales(scale, scale, divides=True)


def _times_reciprocal_of_max(amax: torch.Tensor) -> torch.Tensor:
    return amax * (amax.new_tensor(1.0) / amax.new_tensor(E4M3_MAX))


_Rule = Callable[[torch.Tensor, torch.dtype], BlockScales]
_RULES: Mapping[Variant, _Rule] = MappingProxyType(
    {
        "recip": _recip,
        "div": _div,
        "te_f32": _te_f32,
        "te_pow2": _te_pow2,
        "ue8m0": _ue8m0,
        "cuda_v2": _cuda_v2,
        "cuda_v2_ue8m0": _cuda_v2_ue8m0,
        "dsv4_act": _dsv4_act,
    }
)
