"""The coefficients-preserving step: noise is added so that signal and noise coefficients stay those of the schedule.

Shapes: `samplers/transition.py`.
"""

from __future__ import annotations

import math

import torch

from miles_diffusion.errors import ScheduleError
from miles_diffusion.samplers.transition import GaussianStep, interval


def flow_cps_step(
    sample_BX: torch.Tensor,
    velocity_BX: torch.Tensor,
    sigmas_T1: torch.Tensor,
    step: int | torch.Tensor,
    *,
    noise_level: float,
) -> GaussianStep:
    """The distribution of the next latent; `std_dev_t` and `noise_std` are the same, and 0 in a step to sigma 0.

        std  = s' sin(eta pi / 2)
        mean = (1 - s') (x - s v) + sqrt(s'^2 - std^2) (x + (1 - s) v)

    Args: as `flow_sde_step`, with `noise_level` from 0 (the ODE step) to 1.

    Raises:
        LatentError, ScheduleError: see `interval`; also for a noise level outside 0 to 1.
    """
    if not 0 <= noise_level <= 1:
        raise ScheduleError(f"noise_level is {noise_level}: this sampler takes 0 to 1")
    at = interval(sample_BX, velocity_BX, sigmas_T1, step)
    s_B, next_B = at.sigma_B, at.sigma_next_B
    angle = noise_level * math.pi / 2
    std_B = next_B * math.sin(angle)
    clean_BX = at.x_BX - at.over_latent(s_B) * at.v_BX
    noise_BX = at.x_BX + at.over_latent(1 - s_B) * at.v_BX
    # Rounding can make the difference slightly negative at noise level 1.
    kept_B = torch.sqrt((next_B**2 - std_B**2).clamp(min=0))
    mean_BX = at.over_latent(1 - next_B) * clean_BX + at.over_latent(kept_B) * noise_BX
    return GaussianStep(mean_BX, std_B, std_B)
