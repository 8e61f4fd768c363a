"""Torch tensors as bytes and back. Imported only where torch is in use."""

from __future__ import annotations

import torch

from miles_weightsync.errors import TensorError
from miles_weightsync.protocols import WireTensor
from miles_weightsync.tensors import RawTensor

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def from_torch(tensor: torch.Tensor) -> RawTensor:
    """View a tensor as bytes; contiguous CPU memory is not copied. Raises TensorError (code `dtype`)."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise TensorError("dtype", f"torch dtype {tensor.dtype} does not travel: use one of {' '.join(_DTYPES)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return RawTensor(name, tuple(tensor.shape), data)


def to_torch(tensor: WireTensor) -> torch.Tensor:
    """A new tensor with a copy of the bytes."""
    dtype = _DTYPES[tensor.dtype]
    if tensor.data.nbytes == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(dtype).reshape(tensor.shape)
