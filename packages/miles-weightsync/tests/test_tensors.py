"""Arrays and tensors as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_weightsync import RawTensor, TensorError, as_wire
from miles_weightsync.torch_tensors import to_torch


def test_numpy_memory_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    wire = as_wire(array)
    array[0, 0] = 7.0
    assert (wire.dtype, wire.shape, wire.nbytes) == ("F32", (2, 3), 24)
    assert bytes(wire.data[:4]) == np.float32(7.0).tobytes()


def test_torch_memory_is_not_copied() -> None:
    tensor = torch.zeros(4, requires_grad=True)
    wire = as_wire(tensor)
    with torch.no_grad():
        tensor[0] = 1.0
    assert bytes(wire.data[:4]) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
        (torch.float32, "F32"),
        (torch.int32, "I32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_each_torch_dtype_travels_and_comes_back(dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> None:
    nbytes = int(np.prod(shape, dtype=int)) * torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(1).bytes(nbytes)
    tensor = to_torch(RawTensor(name, shape, memoryview(raw)))
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    wire = as_wire(tensor)
    assert (wire.dtype, wire.shape, bytes(wire.data)) == (name, shape, raw)


def test_transposed_tensors_travel_row_major() -> None:
    assert bytes(as_wire(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T).data) == bytes([1, 3, 2, 4])
    assert bytes(as_wire(np.array([[1, 2], [3, 4]], dtype=np.uint8).T).data) == bytes([1, 3, 2, 4])


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros(2, ">f4"), torch.zeros(2, dtype=torch.float64), [1.0], None])
def test_what_has_no_wire_dtype_is_refused(value: object) -> None:
    with pytest.raises(TensorError) as caught:
        as_wire(value)
    assert caught.value.code == "dtype"


def test_bytes_must_fit_shape_and_dtype() -> None:
    with pytest.raises(TensorError) as caught:
        RawTensor("F32", (2,), memoryview(bytes(7)))
    assert caught.value.code == "size"
