"""The golden file format: reading files and tensors, comparing results with what a case expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from miles_quant.conformance.generators import splitmix64_bf16
from miles_quant.errors import GoldenFileError

SCHEMA = "miles-quant-golden/1"

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i32": torch.int32,
    "u32": torch.uint32,
    "e8m0": torch.uint8,
}


def read_golden(path: Path) -> dict[str, Any]:
    """The content of a golden file.

    Raises:
        GoldenFileError: not readable, not JSON, or of another schema.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GoldenFileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise GoldenFileError(f"{path} is not of schema {SCHEMA}")
    if not isinstance(content.get("cases"), list) or not isinstance(content.get("format"), str):
        raise GoldenFileError(f"{path} lacks `format` or `cases`")
    return content


def read_tensor(spec: Mapping[str, Any]) -> torch.Tensor:
    """The tensor that `spec` gives by bytes or by a generator.

    Raises:
        GoldenFileError: unknown dtype or generator, or bytes that do not fit the shape.
    """
    shape = tuple(spec["shape"])
    if "generator" in spec:
        return _generated(spec["generator"], shape)
    if spec["dtype"] not in _DTYPES:
        raise GoldenFileError(f"unknown dtype {spec['dtype']}")
    dtype = _DTYPES[spec["dtype"]]
    data = bytearray.fromhex(spec["hex"])
    if len(data) != torch.Size(shape).numel() * dtype.itemsize:
        raise GoldenFileError(f"{len(data)} bytes do not make a {spec['dtype']} tensor of {shape}")
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _generated(generator: Mapping[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    if generator["name"] != "splitmix64-bf16":
        raise GoldenFileError(f"unknown generator {generator['name']}")
    return splitmix64_bf16(shape, seed=generator["seed"], exp_lo=generator["exp_lo"], exp_hi=generator["exp_hi"])


def difference(case: Mapping[str, Any], results: Mapping[str, torch.Tensor]) -> str | None:
    """The first way in which `results` are not what `case` expects; None when all is equal."""
    expected: Mapping[str, Any] = case.get("expect") or case["expect_digest"]
    for key, spec in expected.items():
        if key not in results:
            return f"nothing computed for {key}"
        found = _digest_difference(spec, results[key]) if "sha256" in spec else _byte_difference(spec, results[key])
        if found:
            return f"{key}: {found}"
    return None


def _digest_difference(spec: Mapping[str, Any], result: torch.Tensor) -> str | None:
    if list(result.shape) != spec["shape"]:
        return f"shape {list(result.shape)}, expected {spec['shape']}"
    data = _data(result)
    digest = hashlib.sha256(data).hexdigest()
    if digest == spec["sha256"]:
        return None
    return f"sha256 {digest}, expected {spec['sha256']} (head {data[:64].hex()}, expected {spec['head_hex']})"


def _byte_difference(spec: Mapping[str, Any], result: torch.Tensor) -> str | None:
    expected = read_tensor(spec)
    if result.shape != expected.shape:
        return f"shape {list(result.shape)}, expected {list(expected.shape)}"
    if _data(result) == _data(expected):
        return None
    for index, (ours, theirs) in enumerate(zip(result.flatten(), expected.flatten(), strict=True)):
        both_nan = expected.is_floating_point() and bool(ours.isnan()) and bool(theirs.isnan())
        if not both_nan and _data(ours) != _data(theirs):
            return f"element {index} is {_shown(ours)}, expected {_shown(theirs)}"
    return None


def _shown(element: torch.Tensor) -> str:
    return f"{element.item()} ({_data(element).hex()})"


def _data(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
