"""Reinforcement learning for diffusion and flow-matching models.

Names are loaded when first used, so that `import miles_diffusion` and `miles-diffusion --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from miles_diffusion.config import DiffusionConfig, SamplerConfig
from miles_diffusion.errors import (
    DiffusionError,
    GoldenFileError,
    LatentError,
    ScheduleError,
    UndefinedLogProbError,
)

if TYPE_CHECKING:
    from miles_diffusion.samplers.choice import step_function
    from miles_diffusion.samplers.dance import dance_step
    from miles_diffusion.samplers.flow_cps import flow_cps_step
    from miles_diffusion.samplers.flow_ode import flow_ode_step, flow_ode_transition
    from miles_diffusion.samplers.flow_sde import flow_sde_step
    from miles_diffusion.samplers.transition import GaussianStep
    from miles_diffusion.schedules import shifted_sigmas

_HOMES = {
    "GaussianStep": "samplers.transition",
    "dance_step": "samplers.dance",
    "flow_cps_step": "samplers.flow_cps",
    "flow_ode_step": "samplers.flow_ode",
    "flow_ode_transition": "samplers.flow_ode",
    "flow_sde_step": "samplers.flow_sde",
    "shifted_sigmas": "schedules",
    "step_function": "samplers.choice",
}

__all__ = [
    "DiffusionConfig",
    "DiffusionError",
    "GaussianStep",
    "GoldenFileError",
    "LatentError",
    "SamplerConfig",
    "ScheduleError",
    "UndefinedLogProbError",
    "dance_step",
    "flow_cps_step",
    "flow_ode_step",
    "flow_ode_transition",
    "flow_sde_step",
    "shifted_sigmas",
    "step_function",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
