"""Options: frozen, unknown ones refused, and each row of the refusal table."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from miles_trainer import TrainerConfig
from miles_trainer.refusals import REFUSALS

ROWS: dict[str, dict[str, Any]] = {
    "kl_twice": {"objective": {"kl": {"coef": 0.1, "reward_coef": 0.1}}},
    "kl_in_reward_with_grpo": {"objective": {"kl": {"reward_coef": 0.1}}},
    "unbiased_without_kl": {"objective": {"kl": {"unbiased": True}}},
    "dual_clip_bound": {"objective": {"dual_clip": 1.0}},
    "tis_bounds": {"objective": {"tis": {"low": 3.0, "high": 2.0}}},
    "clip_low_range": {"objective": {"clip_low": 1.0}},
    "constant_without_divisor": {"objective": {"aggregation": "constant"}},
    "divisor_without_constant": {"objective": {"constant_divisor": 1000}},
    "update_pass_repeated": {"objective": {"old_logprobs": "update_pass"}, "n_updates_per_batch": 2},
    "save_without_folder": {"checkpoint": {"every_steps": 2}},
}


def test_every_row_of_the_table_has_a_case() -> None:
    assert [row.code for row in REFUSALS] == list(ROWS)


@pytest.mark.parametrize("code", list(ROWS))
def test_the_row_refuses_and_says_so(code: str) -> None:
    with pytest.raises(ValidationError, match=rf"\[{code}\]"):
        TrainerConfig.model_validate(ROWS[code])


def test_defaults_are_accepted_and_frozen() -> None:
    config = TrainerConfig()
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("options", [{"sed": 1}, {"objective": {"clip_hihg": 0.3}}, {"packing": {"max_tokens": 0}}])
def test_misspelt_or_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainerConfig.model_validate(options)


def test_the_digest_covers_what_decides_the_numbers() -> None:
    base = TrainerConfig()
    assert base.digest() == TrainerConfig.model_validate({"checkpoint": {"keep": 7}}).digest()
    assert base.digest() != TrainerConfig.model_validate({"seed": 7}).digest()
