from __future__ import annotations

import pytest

from miles_quant import Fp8BlockRecipe

LAYER = "model.layers.3."


@pytest.mark.parametrize(
    "name",
    [
        LAYER + "self_attn.q_proj.weight",
        LAYER + "mlp.gate_proj.weight",
        LAYER + "mlp.gate_up_proj.weight",
        LAYER + "mlp.experts.7.down_proj.weight",
        LAYER + "self_attn.kv_b_proj.weight",
    ],
)
def test_projections_are_quantised(name: str):
    recipe = Fp8BlockRecipe()
    assert recipe.select(name, (128, 64)) is recipe.format
    assert recipe.emitted_names(name, (128, 64)) == (name, name + "_scale_inv")


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("lm_head.weight", (8, 8), "segment lm_head"),
        ("model.embed_tokens.weight", (8, 8), "segment embed_tokens"),
        (LAYER + "mlp.gate.weight", (8, 8), "segment gate"),
        (LAYER + "mlp.shared_expert_gate.weight", (1, 8), "segment shared_expert_gate"),
        (LAYER + "self_attn.q_norm.weight", (8,), "1-D"),
        (LAYER + "self_attn.q_proj.bias", (8,), "not a weight"),
        (LAYER + "mlp.conv.weight", (8, 8, 3), "3-D"),
        ("visual.blocks.0.mlp.up_proj.weight", (8, 8), "segment visual"),
        (LAYER + "mlp.up_proj.weight", (0, 8), "empty"),
        ("weight", (8, 8), "not a weight"),
    ],
)
def test_the_rest_stays_and_says_why(name: str, shape: tuple[int, ...], reason: str):
    recipe = Fp8BlockRecipe()
    assert recipe.reason_to_keep(name, shape) == reason
    assert recipe.emitted_names(name, shape) == (name,)


def test_expert_stacks_are_quantised_where_they_are_named_as_such():
    assert Fp8BlockRecipe().select(LAYER + "mlp.experts.gate_up_proj.weight", (4, 8, 8)) is not None


def test_users_keep_layers_and_segments():
    recipe = Fp8BlockRecipe(bf16_layers=frozenset({3}), exclude=frozenset({"wk"}))
    assert recipe.reason_to_keep(LAYER + "self_attn.q_proj.weight", (8, 8)) == "layer 3 stays"
    assert recipe.reason_to_keep("model.layers.30.self_attn.q_proj.weight", (8, 8)) is None
    assert recipe.reason_to_keep("model.layers.4.self_attn.indexer.wk.weight", (8, 8)) == "segment wk"
    assert recipe.reason_to_keep("model.layers.4.self_attn.indexer.wkv.weight", (8, 8)) is None


def test_only_the_last_weight_of_a_name_is_its_suffix():
    name = "model.weight.layers.0.up_proj.weight"
    assert Fp8BlockRecipe().emitted_names(name, (8, 8)) == (name, "model.weight.layers.0.up_proj.weight_scale_inv")
