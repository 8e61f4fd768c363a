from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_quant import QuantDtypeError, decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0
from miles_quant.casts import next_power_of_two, previous_power_of_two

ALL_CODES = torch.arange(256, dtype=torch.uint8)
FINITE_CODES = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def e4m3_value(code: int) -> float:
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


def test_decode_follows_the_definition_of_the_format():
    expected = torch.tensor([e4m3_value(int(code)) for code in FINITE_CODES])
    assert torch.equal(decode_e4m3(FINITE_CODES), expected)


def test_codes_survive_decoding_and_encoding():
    assert torch.equal(encode_e4m3(decode_e4m3(FINITE_CODES)), FINITE_CODES)


def test_overflow_saturates_and_nan_keeps_its_sign():
    inf = float("inf")
    values = torch.tensor([448.0, 449.0, 1e30, inf, -448.0, -inf, -0.0, float_of(0x7FC00000), float_of(0xFFC00000)])
    assert encode_e4m3(values).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x80, 0x7F, 0xFF]


@given(st.integers(0, 0x7E), st.sampled_from([-1, 0, 1]), st.booleans())
def test_midpoints_round_to_even_and_their_neighbours_to_the_nearer_code(code: int, offset: int, negative: bool):
    upper = min(code + 1, 0x7E)
    middle = (e4m3_value(code) + e4m3_value(upper)) / 2
    bits = struct.unpack("<I", struct.pack("<f", middle))[0] + (offset if middle else 0)
    value = float_of(bits)
    nearest = {-1: code, 1: upper, 0: code if code % 2 == 0 else upper}[offset if middle else 0]
    if code == upper:
        nearest = code
    sign = 0x80 if negative else 0
    assert encode_e4m3(torch.tensor([-value if negative else value])).item() == nearest | sign


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_encoding_agrees_with_the_library_cast_after_clamping(values: list[float]):
    x = torch.tensor(values, dtype=torch.float32)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encode_e4m3(x), expected)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=32))
def test_encoding_is_monotone_and_odd(values: list[float]):
    x = torch.tensor(sorted(values), dtype=torch.float32)
    decoded = decode_e4m3(encode_e4m3(x))
    assert bool((decoded[1:] >= decoded[:-1]).all())
    assert torch.equal(encode_e4m3(-x), encode_e4m3(x) ^ 0x80)


def test_e8m0_codes_are_powers_of_two_down_to_a_subnormal():
    codes = torch.arange(255, dtype=torch.uint8)
    values = decode_e8m0(codes)
    assert torch.equal(values.double(), 2.0 ** (codes.double() - 127))
    assert torch.equal(encode_e8m0(values), codes)
    assert decode_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan().item()


def test_e8m0_refuses_a_scale_that_is_not_a_power_of_two():
    with pytest.raises(QuantDtypeError, match=r"scale 3\.0 is not a power of two"):
        encode_e8m0(torch.tensor([2.0, 3.0]))


@given(st.floats(min_value=2.0**-120, max_value=2.0**120, width=32))
def test_powers_of_two_bracket_the_value(value: float):
    x = torch.tensor([value])
    below, above = previous_power_of_two(x), next_power_of_two(x)
    assert bool((below <= x) & (x <= above))
    assert bool((above == 2 * below) | (above == below))


def test_casts_name_the_dtype_they_need():
    with pytest.raises(QuantDtypeError, match=r"encode_e4m3 takes torch\.float32, got torch\.bfloat16"):
        encode_e4m3(torch.zeros(2, dtype=torch.bfloat16))
