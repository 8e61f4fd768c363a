"""Bit-exact low-precision formats for RL training and rollout.

Names are loaded when first used, so that `import miles_quant` and `miles-quant --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from miles_quant.config import Fp8BlockConfig, QuantConfig
from miles_quant.errors import (
    CheckpointFolderError,
    GoldenFileError,
    MissingTensorError,
    NonFiniteError,
    QuantDtypeError,
    QuantError,
    QuantShapeError,
)
from miles_quant.protocols import Format

if TYPE_CHECKING:
    from miles_quant.adapters import Fp8BlockEncoder, Fp8BlockQuantizer, Fp8BlockWeightFormat
    from miles_quant.casts import decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0
    from miles_quant.formats.fp8_block import Fp8Block
    from miles_quant.quantized import Quantized
    from miles_quant.recipes import Fp8BlockRecipe
    from miles_quant.reference import dequantize, fake_quantize, quantize

_HOMES = {
    "Fp8Block": "formats.fp8_block",
    "Fp8BlockEncoder": "adapters",
    "Fp8BlockQuantizer": "adapters",
    "Fp8BlockRecipe": "recipes",
    "Fp8BlockWeightFormat": "adapters",
    "Quantized": "quantized",
    "decode_e4m3": "casts",
    "decode_e8m0": "casts",
    "dequantize": "reference",
    "encode_e4m3": "casts",
    "encode_e8m0": "casts",
    "fake_quantize": "reference",
    "quantize": "reference",
}

__all__ = [
    "CheckpointFolderError",
    "Format",
    "Fp8Block",
    "Fp8BlockConfig",
    "Fp8BlockEncoder",
    "Fp8BlockQuantizer",
    "Fp8BlockRecipe",
    "Fp8BlockWeightFormat",
    "GoldenFileError",
    "MissingTensorError",
    "NonFiniteError",
    "QuantConfig",
    "QuantDtypeError",
    "QuantError",
    "QuantShapeError",
    "Quantized",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize",
    "encode_e4m3",
    "encode_e8m0",
    "fake_quantize",
    "quantize",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
