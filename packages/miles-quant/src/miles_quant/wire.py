"""Tensors as bytes: safetensors dtype names, row-major little-endian data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch

from miles_quant.errors import QuantDtypeError, QuantShapeError
from miles_quant.protocols import WireTensor

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "U8": torch.uint8,
        "I32": torch.int32,
    }
)
"""safetensors dtype name to torch dtype, for the dtypes that formats read or store."""

_WIRE_DTYPES = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})


@dataclass(frozen=True, slots=True)
class Bytes:
    """A tensor as bytes; has the shape of the weight-sync and engine protocols."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def to_wire(tensor: torch.Tensor) -> Bytes:
    """The bytes of a CPU or device tensor.

    Raises:
        QuantDtypeError: no wire dtype for it.
    """
    if tensor.dtype not in _WIRE_DTYPES:
        raise QuantDtypeError(f"{tensor.dtype} has no wire dtype here; known: {', '.join(TORCH_DTYPES)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Bytes(_WIRE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(flat.numpy().data))


def from_wire(wire: WireTensor, *, name: str = "tensor") -> torch.Tensor:
    """A tensor of its own memory with the bytes of `wire`.

    Raises:
        QuantDtypeError: unknown wire dtype.
        QuantShapeError: the number of bytes does not fit dtype and shape.
    """
    if wire.dtype not in TORCH_DTYPES:
        raise QuantDtypeError(f"{name} has wire dtype {wire.dtype}; known: {', '.join(TORCH_DTYPES)}")
    dtype = TORCH_DTYPES[wire.dtype]
    expected = prod(wire.shape) * dtype.itemsize
    if wire.data.nbytes != expected:
        raise QuantShapeError(f"{name} has {wire.data.nbytes} bytes, {wire.dtype} {wire.shape} needs {expected}")
    if expected == 0:
        return torch.empty(wire.shape, dtype=dtype)
    return torch.frombuffer(bytearray(wire.data), dtype=dtype).reshape(wire.shape)
