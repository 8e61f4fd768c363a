"""The stochastic step of Flow-GRPO: the flow ODE turned into an SDE of the same marginals, so steps have densities.

Source of the formula: Flow-GRPO (arXiv 2505.05470), appendix on the SDE sampler. Shapes: `samplers/transition.py`.
"""

from __future__ import annotations

import torch

from miles_diffusion.errors import ScheduleError
from miles_diffusion.samplers.transition import GaussianStep, interval


def flow_sde_step(
    sample_BX: torch.Tensor,
    velocity_BX: torch.Tensor,
    sigmas_T1: torch.Tensor,
    step: int | torch.Tensor,
    *,
    noise_level: float,
) -> GaussianStep:
    """The distribution of the next latent.

        std_t = eta sqrt(s / (1 - s~)),   s~ = sigmas[1] where s is (close to) 1, else s
        mean  = x (1 + std_t^2 / (2 s) dt) + v (1 + std_t^2 (1 - s) / (2 s)) dt
        noise_std = std_t sqrt(-dt)

    Args:
        sample_BX: latents [B, ...], for example [B, C, H, W] or [B, C, F, H, W]; computed in float32 (float64
            stays float64).
        velocity_BX: predicted velocities, same shape.
        sigmas_T1: schedule [T + 1], falling from at most 1 to 0.
        step: 0-based step, or an integer tensor [B].
        noise_level: eta, at least 0; at 0 the mean is the ODE step.

    Raises:
        LatentError, ScheduleError: see `interval`; also for a negative noise level.
    """
    if not noise_level >= 0:
        raise ScheduleError(f"noise_level is {noise_level}: it must be at least 0")
    at = interval(sample_BX, velocity_BX, sigmas_T1, step)
    s_B, dt_B = at.sigma_B, at.dt_B
    # Engines snapshot sigmas in float32, where a first sigma of 1 may be off by an ulp: compare closely, not exactly.
    denominator_B = 1 - torch.where(torch.isclose(s_B, torch.ones_like(s_B)), at.sigma_second, s_B)
    std_B = noise_level * torch.sqrt(s_B / denominator_B)
    drift_B = std_B**2 / (2 * s_B)
    mean_BX = at.x_BX * at.over_latent(1 + drift_B * dt_B) + at.v_BX * at.over_latent((1 + drift_B * (1 - s_B)) * dt_B)
    return GaussianStep(mean_BX, std_B, std_B * torch.sqrt(-dt_B))
