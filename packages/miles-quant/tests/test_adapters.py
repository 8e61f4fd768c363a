from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_quant import (
    Fp8BlockConfig,
    Fp8BlockEncoder,
    Fp8BlockQuantizer,
    Fp8BlockWeightFormat,
    NonFiniteError,
    QuantDtypeError,
    QuantShapeError,
)
from miles_quant.wire import Bytes, from_wire, to_wire

NAME = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def through_the_wire(config: Fp8BlockConfig, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Encode, and dequantise as an engine does that knows only suffixes and bytes."""
    sent = Fp8BlockEncoder.from_config(config).encode(NAME, to_wire(weight))
    weight_format = Fp8BlockWeightFormat.from_config(config, dtype=dtype)
    stem = NAME.removesuffix("weight")
    return weight_format.dequantize({suffix: from_wire(sent[stem + suffix]) for suffix in weight_format.suffixes()})


@pytest.mark.parametrize("variant", ["recip", "div", "te_f32", "te_pow2", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 30), rows=st.integers(1, 12), columns=st.integers(1, 12))
def test_trainer_wire_and_engine_hold_the_same_bits(
    variant: str, dtype: torch.dtype, seed: int, rows: int, columns: int
):
    config = Fp8BlockConfig.model_validate({"variant": variant, "block": (4, 8)})
    master = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    trained = Fp8BlockQuantizer.from_config(config).fake_quantize_weight(NAME, master)
    assert torch.equal(trained, through_the_wire(config, master, dtype))


def test_exporting_the_rounded_weight_or_the_master_gives_the_same_bytes():
    master = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    encoder = Fp8BlockEncoder()
    from_master = encoder.encode(NAME, to_wire(master))
    from_rounded = encoder.encode(NAME, to_wire(master.bfloat16()))
    assert {n: bytes(t.data) for n, t in from_master.items()} == {n: bytes(t.data) for n, t in from_rounded.items()}


def test_wire_tensors_name_what_checkpoints_name():
    sent = Fp8BlockEncoder().encode(NAME, to_wire(torch.ones(130, 4, dtype=torch.bfloat16)))
    layout = {name: (t.dtype, t.shape, t.data.nbytes) for name, t in sent.items()}
    assert layout == {
        NAME: ("F8_E4M3", (130, 4), 520),
        NAME + "_scale_inv": ("F32", (2, 1), 8),
    }


def test_what_the_recipe_keeps_passes_untouched():
    norm = torch.ones(8)
    wire = to_wire(norm)
    assert Fp8BlockEncoder().encode(NORM, wire) == {NORM: wire}
    assert Fp8BlockQuantizer().fake_quantize_weight(NORM, norm) is norm
    assert Fp8BlockQuantizer().fake_quantize_activation(NAME, norm) is norm


@pytest.mark.parametrize("variant", ["recip", "cuda_v2", "cuda_v2_ue8m0", "dsv4_act"])
def test_activations_are_quantised_a_token(variant: str):
    config = Fp8BlockConfig.model_validate({"activation_variant": variant, "activation_group": 8})
    quantizer = Fp8BlockQuantizer.from_config(config)
    batch = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(2))
    result = quantizer.fake_quantize_activation(NAME, batch)
    assert torch.equal(result[1, 2:], quantizer.fake_quantize_activation(NAME, batch[1, 2:]))
    assert not torch.equal(result, batch)
    router = "model.layers.0.mlp.gate.weight"
    assert quantizer.fake_quantize_activation(router, batch) is batch


def test_a_non_finite_weight_is_named():
    with pytest.raises(NonFiniteError, match=NAME):
        Fp8BlockEncoder().encode(NAME, to_wire(torch.full((2, 2), float("inf"))))


def test_wire_tensors_that_lie_about_their_size_are_refused():
    with pytest.raises(QuantShapeError, match=r"has 4 bytes, BF16 \(2, 2\) needs 8"):
        from_wire(Bytes("BF16", (2, 2), memoryview(b"1234")))
    with pytest.raises(QuantDtypeError, match="wire dtype F64"):
        from_wire(Bytes("F64", (1,), memoryview(b"12345678")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_bytes_and_tensors_round_trip(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.ones(shape).to(dtype)
    back = from_wire(to_wire(tensor))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bytes(to_wire(back).data) == bytes(to_wire(tensor).data)
