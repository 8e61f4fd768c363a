"""Element casts: E4M3 (fn) and E8M0 as bytes, in integer arithmetic on the fp32 bit pattern.

Libraries disagree on what an overflowing cast gives (NaN or the largest value), so nothing here leans on a library's
cast: magnitudes are clamped first, then rounded to nearest even. Rules: the OCP 8-bit floating point specification
(E4M3) and the OCP microscaling specification (E8M0).
"""

from __future__ import annotations

import torch

from miles_quant.errors import QuantDtypeError

E4M3_MAX = 448.0

_MAGNITUDE_MASK = 0x7FFF_FFFF
_INFINITY_BITS = 0x7F80_0000
_E4M3_MAX_BITS = 0x43E0_0000  # 448.0
_E4M3_MIN_NORMAL_BITS = 0x3C80_0000  # 2^-6
_E4M3_NAN = 0x7F
_DROPPED_BITS = 20  # fp32 has 23 mantissa bits, E4M3 has 3
_BIAS_DIFFERENCE = 127 - 7
_E4M3_SUBNORMAL_MAGIC = 16384.0  # one ulp of 2^14 in fp32 is 2^-9, the step of E4M3 subnormals
_SUBNORMAL_MAGIC_BITS = 0x4680_0000
_E8M0_ZERO_BITS = 0x0040_0000  # 2^-127 is an fp32 subnormal
_E8M0_NAN = 255


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to E4M3 codes.

    Args:
        values: float32, any shape.

    Returns:
        uint8 codes of the same shape: nearest even; magnitudes of 448 and above, infinities included, give 0x7E or
        0xFE; NaN gives 0x7F or 0xFF by its sign; -0 gives 0x80.

    Raises:
        QuantDtypeError: `values` is not float32.
    """
    _require(values, torch.float32, "encode_e4m3")
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE_MASK
    clamped = magnitude.clamp(max=_E4M3_MAX_BITS)
    codes = torch.where(clamped < _E4M3_MIN_NORMAL_BITS, _round_subnormal(clamped), _round_normal(clamped))
    codes = torch.where(magnitude > _INFINITY_BITS, _E4M3_NAN, codes)
    sign = (bits >> 24) & 0x80
    return (codes | sign).to(torch.uint8)


def _round_normal(magnitude: torch.Tensor) -> torch.Tensor:
    """Nearest even on the bits: adding just under half an ulp, plus the last kept bit, carries exactly when it must."""
    last_kept_bit = (magnitude >> _DROPPED_BITS) & 1
    rounded = magnitude - (_BIAS_DIFFERENCE << 23) + ((1 << (_DROPPED_BITS - 1)) - 1) + last_kept_bit
    return rounded >> _DROPPED_BITS


def _round_subnormal(magnitude: torch.Tensor) -> torch.Tensor:
    """Adding 2^14 aligns the mantissa to steps of 2^-9; the fp32 addition itself rounds to nearest even."""
    aligned = magnitude.view(torch.float32) + _E4M3_SUBNORMAL_MAGIC
    return aligned.view(torch.int32) - _SUBNORMAL_MAGIC_BITS


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Widen E4M3 codes (uint8 or float8_e4m3fn, any shape) to float32, exactly.

    Raises:
        QuantDtypeError: `codes` has another dtype.
    """
    if codes.dtype == torch.uint8:
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    _require(codes, torch.float8_e4m3fn, "decode_e4m3")
    return codes.to(torch.float32)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Widen E8M0 codes (uint8, any shape) to float32: 2^(code - 127), with 255 as NaN.

    Raises:
        QuantDtypeError: `codes` is not uint8.
    """
    _require(codes, torch.uint8, "decode_e8m0")
    wide = codes.to(torch.int32)
    bits = torch.where(wide == 0, _E8M0_ZERO_BITS, wide << 23)
    values = bits.view(torch.float32)
    return torch.where(wide == _E8M0_NAN, torch.nan, values)


def encode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """The E8M0 codes (uint8) of float32 scales that are powers of two from 2^-127 to 2^127.

    Raises:
        QuantDtypeError: `scales` is not float32, or a scale is not such a power of two.
    """
    _require(scales, torch.float32, "encode_e8m0")
    bits = scales.contiguous().view(torch.int32)
    codes = bits >> 23
    exact = ((bits & 0x007F_FFFF) == 0) & (codes > 0) & (codes < _E8M0_NAN)
    exact |= bits == _E8M0_ZERO_BITS
    if not bool(exact.all()):
        bad = scales[~exact].flatten()[0].item()
        raise QuantDtypeError(
            f"scale {bad!r} is not a power of two from 2^-127 to 2^127, so E8M0 cannot hold it: "
            "quantise with a power-of-two variant such as ue8m0"
        )
    return codes.to(torch.uint8)


def next_power_of_two(values: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(v)) of positive float32 values, from the bits (a logarithm is not exact); exponents -126..127."""
    bits = values.contiguous().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x007F_FFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def previous_power_of_two(values: torch.Tensor) -> torch.Tensor:
    """2^floor(log2(v)) of positive normal float32 values: the value with its mantissa cleared."""
    return (values.contiguous().view(torch.int32) & ~0x007F_FFFF).view(torch.float32)


def _require(tensor: torch.Tensor, dtype: torch.dtype, function: str) -> None:
    if tensor.dtype != dtype:
        raise QuantDtypeError(f"{function} takes {dtype}, got {tensor.dtype}: convert the tensor first")
