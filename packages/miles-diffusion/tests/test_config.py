from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from miles_diffusion import DiffusionConfig, flow_sde_step, shifted_sigmas, step_function


def test_the_default_sampler_is_flow_grpo():
    config = DiffusionConfig()
    assert (config.sampler.step.kind, config.sampler.num_steps, config.sampler.shift) == ("sde", 10, 3.0)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance", "ode"])
def test_every_kind_builds_a_step(kind: str):
    config = DiffusionConfig.model_validate({"sampler": {"step": {"kind": kind}}})
    sigmas = shifted_sigmas(config.sampler.num_steps, config.sampler.shift)
    x = torch.ones(2, 1, 2, 2)
    step = step_function(config.sampler.step)(x, x, sigmas, 3)
    assert step.mean_BX.shape == x.shape
    assert bool((step.noise_std_B > 0).all()) == (kind != "ode")


def test_the_noise_level_of_the_configuration_is_used():
    config = DiffusionConfig.model_validate({"sampler": {"step": {"kind": "sde", "noise_level": 1.2}}})
    sigmas, x = shifted_sigmas(10, 3.0), torch.ones(1, 1)
    built = step_function(config.sampler.step)(x, x, sigmas, 3)
    assert torch.equal(built.noise_std_B, flow_sde_step(x, x, sigmas, 3, noise_level=1.2).noise_std_B)


@pytest.mark.parametrize(
    "sampler",
    [
        {"steps": 10},
        {"num_steps": 0},
        {"shift": 0},
        {"step": {"kind": "sd"}},
        {"step": {"kind": "cps", "noise_level": 1.2}},
        {"step": {"kind": "ode", "noise_level": 0.7}},
    ],
)
def test_misspelt_or_impossible_options_are_refused(sampler: dict[str, Any]):
    with pytest.raises(ValidationError):
        DiffusionConfig.model_validate({"sampler": sampler})
