"""The step of constant noise level (DanceGRPO): Euler step, a score correction, and noise of `eta sqrt(-dt)`.

Shapes: `samplers/transition.py`.
"""

from __future__ import annotations

import torch

from miles_diffusion.errors import ScheduleError
from miles_diffusion.samplers.transition import GaussianStep, interval


def dance_step(
    sample_BX: torch.Tensor,
    velocity_BX: torch.Tensor,
    sigmas_T1: torch.Tensor,
    step: int | torch.Tensor,
    *,
    noise_level: float,
) -> GaussianStep:
    """The distribution of the next latent.

        score = -(x - (1 - s) (x - s v)) / s^2
        mean  = x + v dt - eta^2 / 2 score dt
        std_dev_t = eta,   noise_std = eta sqrt(-dt)

    Args: as `flow_sde_step`.

    Raises:
        LatentError, ScheduleError: see `interval`; also for a negative noise level.
    """
    if not noise_level >= 0:
        raise ScheduleError(f"noise_level is {noise_level}: it must be at least 0")
    at = interval(sample_BX, velocity_BX, sigmas_T1, step)
    s_BX, dt_BX = at.over_latent(at.sigma_B), at.over_latent(at.dt_B)
    clean_BX = at.x_BX - s_BX * at.v_BX
    score_BX = -(at.x_BX - (1 - s_BX) * clean_BX) / s_BX**2
    mean_BX = at.x_BX + dt_BX * at.v_BX - 0.5 * noise_level**2 * score_BX * dt_BX
    std_B = torch.full_like(at.sigma_B, noise_level)
    return GaussianStep(mean_BX, std_B, std_B * torch.sqrt(-at.dt_B))
