from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_quant import (
    Fp8Block,
    MissingTensorError,
    NonFiniteError,
    QuantDtypeError,
    QuantError,
    QuantShapeError,
    dequantize,
    quantize,
)
from miles_quant.formats.scales import ACTIVATION_VARIANTS, WEIGHT_VARIANTS, Variant

VARIANTS = sorted({*WEIGHT_VARIANTS, *ACTIVATION_VARIANTS})
every_variant = pytest.mark.parametrize("variant", VARIANTS)
sizes = st.integers(1, 20)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored_bytes(x: torch.Tensor, format: Fp8Block) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in quantize(x, format).tensors.values()]


def test_worked_example_of_the_specification():
    w = torch.tensor([[0, -0.25], [0.5, 0.75]])
    quantized = quantize(w, Fp8Block(block=(2, 2), variant="ue8m0"))
    assert quantized.tensors["weight"].view(torch.uint8).tolist() == [[0x00, 0xF0], [0x78, 0x7C]]
    assert quantized.tensors["weight_scale_inv"].item() == 2.0**-9
    assert torch.equal(dequantize(quantized), w)


def test_stored_tensors_have_the_shapes_and_dtypes_of_checkpoints():
    tensors = quantize(normal(130, 300), Fp8Block()).tensors
    assert (tensors["weight"].dtype, tensors["weight"].shape) == (torch.float8_e4m3fn, (130, 300))
    assert (tensors["weight_scale_inv"].dtype, tensors["weight_scale_inv"].shape) == (torch.float32, (2, 3))


@every_variant
@given(rows=sizes, columns=sizes, block=st.tuples(st.integers(1, 8), st.integers(1, 8)), seed=st.integers(0, 99))
def test_error_stays_within_half_a_step(variant: Variant, rows: int, columns: int, block: tuple[int, int], seed: int):
    x = normal(rows, columns, seed=seed)
    format = Fp8Block(block=block, variant=variant)
    quantized = quantize(x, format)
    scale = quantized.tensors["weight_scale_inv"]
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    # Half an E4M3 step is at most 1/16 of the value, or 2^-10 of the scale for subnormals; the rest is rounding.
    bound = torch.maximum(x.abs() / 16, spread * 2.0**-10) * 1.00001
    assert bool(((dequantize(quantized) - x).abs() <= bound).all())


@every_variant
def test_blocks_do_not_see_each_other(variant: Variant):
    format = Fp8Block(block=(4, 8), variant=variant)
    x = normal(8, 16)
    changed = x.clone()
    changed[4:, 8:] *= 100
    before, after = quantize(x, format).tensors["weight"], quantize(changed, format).tensors["weight"]
    assert torch.equal(before[:4].view(torch.uint8), after[:4].view(torch.uint8))
    assert torch.equal(before[4:, :8].view(torch.uint8), after[4:, :8].view(torch.uint8))


@every_variant
def test_strided_input_gives_the_bytes_of_contiguous_input(variant: Variant):
    wide = normal(24, 40)
    for view in (wide.t(), wide[::2, 1::3]):
        format = Fp8Block(block=(4, 8), variant=variant)
        assert stored_bytes(view, format) == stored_bytes(view.contiguous(), format)


@every_variant
def test_whole_block_rows_can_be_quantised_apart(variant: Variant):
    x = normal(10, 20)
    format = Fp8Block(block=(4, 8), variant=variant)
    whole, upper, lower = (quantize(part, format).tensors for part in (x, x[:4], x[4:]))
    for suffix in format.suffixes:
        parts = torch.cat([upper[suffix].view(torch.uint8), lower[suffix].view(torch.uint8)])
        assert torch.equal(whole[suffix].view(torch.uint8), parts)


def test_an_expert_stack_is_its_experts():
    stack = normal(3, 7, 19)
    format = Fp8Block(block=(4, 8))
    whole = quantize(stack, format)
    for index, expert in enumerate(stack):
        alone = quantize(expert, format)
        for suffix in format.suffixes:
            assert torch.equal(whole.tensors[suffix][index].view(torch.uint8), alone.tensors[suffix].view(torch.uint8))
        assert torch.equal(dequantize(whole)[index], dequantize(alone))


@every_variant
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_block_has_zero_codes_and_a_usable_scale(variant: Variant, zero: float):
    quantized = quantize(torch.full((2, 2), zero), Fp8Block(block=(2, 2), variant=variant))
    assert quantized.tensors["weight"].view(torch.uint8).unique().tolist() == [0x80 if str(zero)[0] == "-" else 0x00]
    assert bool((quantized.tensors["weight_scale_inv"] > 0).all())


@pytest.mark.parametrize("variant", ["recip", "div", "te_f32"])
@given(seed=st.integers(0, 50))
def test_bfloat16_weights_come_back_to_the_same_codes(variant: Variant, seed: int):
    format = Fp8Block(block=(4, 8), variant=variant)
    first = quantize(normal(8, 16, seed=seed).bfloat16(), format)
    second = quantize(dequantize(first, dtype=torch.bfloat16), format)
    for suffix in format.suffixes:
        assert torch.equal(first.tensors[suffix].view(torch.uint8), second.tensors[suffix].view(torch.uint8))


@given(seed=st.integers(0, 50))
def test_power_of_two_scales_keep_values_when_requantised(seed: int):
    format = Fp8Block(block=(4, 8), variant="ue8m0")
    first = dequantize(quantize(normal(8, 16, seed=seed).bfloat16(), format))
    assert torch.equal(dequantize(quantize(first, format)), first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_an_error_that_says_where(bad: float):
    x = torch.zeros(4, 8)
    x[2, 5] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.0\.w holds -?(nan|inf) at index \(2, 5\)"):
        quantize(x, Fp8Block(), name="layers.0.w")


def test_non_finite_input_can_be_let_through_for_debugging():
    x = torch.ones(1, 16)
    x[0, 3] = float("nan")
    codes = quantize(x, Fp8Block(block=(1, 8)), nonfinite="propagate").tensors["weight"].view(torch.uint8)
    assert codes[0, 3].item() & 0x7F == 0x7F
    assert codes[0, 8:].tolist() == [0x7E] * 8


@pytest.mark.parametrize("shape", [(8,), (2, 2, 2, 2), (), (0, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]):
    with pytest.raises(QuantShapeError, match="FP8 blocks take a matrix"):
        quantize(torch.zeros(shape), Fp8Block())


def test_other_dtypes_and_blocks_are_refused():
    with pytest.raises(QuantDtypeError, match=r"x is torch\.float64"):
        quantize(torch.zeros(2, 2, dtype=torch.float64), Fp8Block(), name="x")
    with pytest.raises(QuantShapeError, match="side below 1"):
        Fp8Block(block=(0, 128))


def test_codes_without_their_scale_are_refused():
    format = Fp8Block()
    tensors = quantize(normal(4, 4), format).tensors
    with pytest.raises(MissingTensorError, match="weight_scale_inv absent"):
        format.decode({"weight": tensors["weight"]})
    with pytest.raises(QuantShapeError, match="do not fit blocks"):
        format.decode({**tensors, "weight_scale_inv": torch.ones(2, 2)})


def test_errors_share_a_root():
    for error in (NonFiniteError, QuantShapeError, QuantDtypeError, MissingTensorError):
        assert issubclass(error, QuantError)
