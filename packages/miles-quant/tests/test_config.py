from __future__ import annotations

import pytest
from pydantic import ValidationError

from miles_quant import Fp8BlockRecipe, QuantConfig


def test_defaults_are_the_engine_defaults():
    recipe = Fp8BlockRecipe.from_config(QuantConfig().fp8_block)
    assert (recipe.format.block, recipe.format.variant) == ((128, 128), "recip")


@pytest.mark.parametrize(
    "bad",
    [
        {"fp8_blok": {}},
        {"fp8_block": {"variant": "recipe"}},
        {"fp8_block": {"block": [0, 128]}},
        {"fp8_block": {"x": 1}},
    ],
)
def test_misspelt_or_impossible_options_are_refused(bad: dict[str, object]):
    with pytest.raises(ValidationError):
        QuantConfig.model_validate(bad)


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        QuantConfig().fp8_block.variant = "div"  # type: ignore[misc]
