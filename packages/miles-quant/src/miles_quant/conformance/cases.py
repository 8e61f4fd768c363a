"""What each golden case computes, through the public functions. What is absent here is not built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from miles_quant.casts import decode_e4m3, decode_e8m0, encode_e4m3
from miles_quant.conformance.golden import difference, read_tensor
from miles_quant.errors import NonFiniteError, QuantShapeError
from miles_quant.formats.fp8_block import SCALE_SUFFIX, WEIGHT_SUFFIX, Fp8Block
from miles_quant.quantized import Quantized
from miles_quant.recipes import Fp8BlockRecipe
from miles_quant.reference import dequantize, quantize

NOT_BUILT = "not built"

_ERRORS: Mapping[str, type[Exception]] = MappingProxyType({"non_finite": NonFiniteError, "shape": QuantShapeError})


def check_case(family: str, case: Mapping[str, Any]) -> str | None:
    """Why a case fails; None when it passes."""
    check = _CHECKS.get((case.get("format", family), case["op"]))
    return check(case) if check else NOT_BUILT


def _check_cast_e4m3(case: Mapping[str, Any]) -> str | None:
    if case["params"] != {"rounding": "rne", "saturate": True}:
        return NOT_BUILT
    return difference(case, {"codes": encode_e4m3(read_tensor(case["input"]))})


def _check_decode_e4m3(case: Mapping[str, Any]) -> str | None:
    return difference(case, {"values": decode_e4m3(read_tensor(case["input"]))})


def _check_decode_e8m0(case: Mapping[str, Any]) -> str | None:
    return difference(case, {"values": decode_e8m0(read_tensor(case["input"]))})


def _check_quantize(case: Mapping[str, Any]) -> str | None:
    x, format = read_tensor(case["input"]), _format(case["params"])
    if "expect_error" in case:
        return _missing_error(case["expect_error"], lambda: quantize(x, format))
    quantized = quantize(x, format)
    return difference(case, {**_stored(quantized), "dequant": dequantize(quantized)})


def _check_requantize(case: Mapping[str, Any]) -> str | None:
    """Quantise, dequantise to bfloat16, quantise again; and the facts that the case states about the two."""
    format = _format(case["params"])
    first = quantize(read_tensor(case["input"]), format)
    second = quantize(dequantize(first, dtype=torch.bfloat16), format)
    return difference(case, _stored(second)) or _broken_fact(case, first, second)


def _broken_fact(case: Mapping[str, Any], first: Quantized, second: Quantized) -> str | None:
    before, after = _stored(first), _stored(second)
    changed = int((before["codes"] != after["codes"]).sum())
    if "codes_changed" in case and changed != case["codes_changed"]:
        return f"{changed} codes changed, expected {case['codes_changed']}"
    if case.get("scales_unchanged") and not torch.equal(before["scale"], after["scale"]):
        return "scales changed"
    if case.get("values_unchanged") and not torch.equal(dequantize(first), dequantize(second)):
        return "values changed"
    return None


def _check_selection(case: Mapping[str, Any]) -> str | None:
    if case["params"]["recipe"] != "fp8_block":
        return NOT_BUILT
    recipe = Fp8BlockRecipe(bf16_layers=frozenset(case["params"]["bf16_layers"]))
    for tensor in case["tensors"]:
        name, shape = tensor["name"], tensor["shape"]
        selected = recipe.select(name, shape) is not None
        emitted = list(recipe.emitted_names(name, shape))
        if (selected, emitted) != (tensor["quantize"], tensor["emits"]):
            return f"{name}: {selected} {emitted}, expected {tensor['quantize']} {tensor['emits']}"
    return None


def _format(params: Mapping[str, Any]) -> Fp8Block:
    rows, columns = params["block"]
    return Fp8Block(block=(rows, columns), variant=params["variant"])


def _stored(quantized: Quantized) -> dict[str, torch.Tensor]:
    return {
        "codes": quantized.tensors[WEIGHT_SUFFIX].view(torch.uint8),
        "scale": quantized.tensors[SCALE_SUFFIX],
    }


def _missing_error(expected: str, call: Callable[[], object]) -> str | None:
    try:
        call()
    except _ERRORS[expected]:
        return None
    return f"no {_ERRORS[expected].__name__} was raised"


_CHECKS: Mapping[tuple[str, str], Callable[[Mapping[str, Any]], str | None]] = MappingProxyType(
    {
        ("cast.e4m3fn", "cast"): _check_cast_e4m3,
        ("cast.e4m3fn", "decode"): _check_decode_e4m3,
        ("cast.e8m0", "decode"): _check_decode_e8m0,
        ("fp8.block", "quantize"): _check_quantize,
        ("repack", "requantize"): _check_requantize,
        ("recipe.names", "select"): _check_selection,
    }
)
