"""From configuration to a step function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from miles_diffusion.config import CpsStepConfig, DanceStepConfig, OdeStepConfig, SdeStepConfig
from miles_diffusion.samplers.dance import dance_step
from miles_diffusion.samplers.flow_cps import flow_cps_step
from miles_diffusion.samplers.flow_ode import flow_ode_transition
from miles_diffusion.samplers.flow_sde import flow_sde_step
from miles_diffusion.samplers.transition import GaussianStep

StepFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | torch.Tensor], GaussianStep]
"""`step(sample_BX, velocity_BX, sigmas_T1, step) -> GaussianStep`."""


def step_function(config: SdeStepConfig | CpsStepConfig | DanceStepConfig | OdeStepConfig) -> StepFunction:
    """The step that `config` describes."""
    match config:
        case SdeStepConfig(noise_level=level):
            return partial(flow_sde_step, noise_level=level)
        case CpsStepConfig(noise_level=level):
            return partial(flow_cps_step, noise_level=level)
        case DanceStepConfig(noise_level=level):
            return partial(dance_step, noise_level=level)
        case OdeStepConfig():
            return flow_ode_transition
