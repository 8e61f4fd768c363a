"""Quantise, dequantise and fake-quantise: the functions that trainer, exporter and engine share, so that bits agree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from miles_quant.protocols import Format, NonFinite
from miles_quant.quantized import Quantized


def quantize(x: torch.Tensor, format: Format, *, name: str = "tensor", nonfinite: NonFinite = "error") -> Quantized:
    """Turn `x` into the tensors that `format` stores.

    Args:
        x: bfloat16, float16 or float32; shapes as the format says.
        format: for example `Fp8Block(block=(128, 128), variant="recip")`.
        name: used in error messages.
        nonfinite: "error", or "propagate" for debugging.

    Raises:
        NonFiniteError, QuantShapeError, QuantDtypeError: see the format.
    """
    tensors = format.encode(x, name=name, nonfinite=nonfinite)
    return Quantized(tensors=tensors, format=format, shape=tuple(x.shape), dtype=x.dtype)


def dequantize(quantized: Quantized, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that `quantized` stands for: code x scale in float32, then one rounding to `dtype`."""
    return quantized.format.decode(quantized.tensors, dtype=dtype)


def fake_quantize(
    x: torch.Tensor,
    format: Format,
    *,
    name: str = "tensor",
    source_dtype: torch.dtype | None = None,
    nonfinite: NonFinite = "error",
) -> torch.Tensor:
    """`x` as the engine will see it, in the dtype of `x`; gradients pass straight through.

    Args:
        x: as in `quantize`.
        format: the format of the engine's weights.
        name: used in error messages.
        source_dtype: dtype that weights are exported in. fp32 master weights must be rounded to it first, else codes
            differ from those of the exported weights. None keeps the dtype of `x`.
        nonfinite: as in `quantize`.
    """

    def round_trip(values: torch.Tensor) -> torch.Tensor:
        exported = values if source_dtype is None else values.to(source_dtype)
        return dequantize(quantize(exported, format, name=name, nonfinite=nonfinite), dtype=values.dtype)

    result: torch.Tensor = _StraightThrough.apply(x, round_trip)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    """A function whose derivative is taken to be the identity."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
