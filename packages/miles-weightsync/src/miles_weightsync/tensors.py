"""Tensors as bytes: the safetensors dtype names of the wire, and views over numpy and torch without copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_weightsync.errors import TensorError
from miles_weightsync.protocols import WireTensor

ITEM_NBYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1}
"""Bytes of one element of each dtype that travels."""

_FROM_NUMPY = {"float32": "F32", "float16": "F16", "int32": "I32", "uint8": "U8", "int8": "I8"}
_EMPTY = memoryview(b"")


def item_nbytes(dtype: str) -> int:
    """Bytes of one element. Raises TensorError (code `dtype`) for a dtype that does not travel."""
    try:
        return ITEM_NBYTES[dtype]
    except (KeyError, TypeError):
        raise TensorError("dtype", f"dtype {dtype!r} is none of {' '.join(ITEM_NBYTES)}") from None


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises TensorError (codes `dtype`, `shape`)."""
    if any(dim < 0 for dim in shape):
        raise TensorError("shape", f"shape {shape} has a negative dimension")
    return math.prod(shape) * item_nbytes(dtype)


def byte_view(data: memoryview) -> memoryview:
    """The same memory as one dimension of bytes."""
    return _EMPTY if data.nbytes == 0 else data.cast("B")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes. `data` is row-major, little endian and becomes a one-dimensional view of bytes.

    Raises TensorError (codes `dtype`, `shape`, `size`) when the three do not agree.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        wanted = tensor_nbytes(self.dtype, self.shape)
        if not self.data.c_contiguous:
            raise TensorError("size", f"the bytes of a {self.dtype} tensor {self.shape} must be contiguous")
        if self.data.nbytes != wanted:
            raise TensorError("size", f"{self.dtype} {self.shape} has {wanted} bytes, not {self.data.nbytes}")
        object.__setattr__(self, "data", byte_view(self.data))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Spec:
    """Name, dtype and shape of a tensor without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def as_wire(tensor: Any) -> RawTensor:
    """View a RawTensor, any WireTensor, a numpy array or a torch tensor as bytes.

    Contiguous CPU memory is not copied: the result is valid as long as the source's memory is not changed.
    Torch's bfloat16 and float8 travel as their raw bytes. Raises TensorError for dtypes that do not travel.
    """
    if isinstance(tensor, RawTensor):
        return tensor
    if isinstance(tensor, np.ndarray):
        return _from_numpy(tensor)
    if isinstance(tensor, WireTensor) and isinstance(tensor.dtype, str):
        return RawTensor(tensor.dtype, tuple(tensor.shape), tensor.data)
    if type(tensor).__module__.partition(".")[0] == "torch":
        from miles_weightsync.torch_tensors import from_torch  # torch is an extra

        return from_torch(tensor)
    raise TensorError(
        "dtype", f"cannot send a {type(tensor).__name__}: give a numpy array, a torch tensor or a RawTensor"
    )


def _from_numpy(array: np.ndarray[Any, Any]) -> RawTensor:
    dtype = _FROM_NUMPY.get(array.dtype.name)
    if dtype is None or array.dtype.byteorder == ">":
        raise TensorError(
            "dtype", f"numpy dtype {array.dtype.str!r} does not travel: use one of {' '.join(_FROM_NUMPY)}"
        )
    contiguous = np.ascontiguousarray(array)
    data = contiguous.reshape(-1).view(np.uint8).data if array.size else _EMPTY
    return RawTensor(dtype, tuple(array.shape), data)
