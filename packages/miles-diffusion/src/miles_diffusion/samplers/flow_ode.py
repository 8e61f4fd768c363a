"""The Euler step of the flow ODE. Shapes: `samplers/transition.py`."""

from __future__ import annotations

import torch

from miles_diffusion.samplers.transition import GaussianStep, interval


def flow_ode_step(
    sample_BX: torch.Tensor, velocity_BX: torch.Tensor, sigmas_T1: torch.Tensor, step: int | torch.Tensor
) -> torch.Tensor:
    """The next latent, `x + dt v`, in the dtype of `sample_BX`.

    Raises:
        LatentError, ScheduleError: see `interval`.
    """
    at = interval(sample_BX, velocity_BX, sigmas_T1, step)
    dt_BX = at.over_latent(at.dt_B).to(sample_BX.dtype)
    return sample_BX + dt_BX * velocity_BX.to(sample_BX.dtype)


def flow_ode_transition(
    sample_BX: torch.Tensor, velocity_BX: torch.Tensor, sigmas_T1: torch.Tensor, step: int | torch.Tensor
) -> GaussianStep:
    """The Euler step as a Gaussian without noise: its mean is `flow_ode_step`, both deviations are 0.

    Raises:
        LatentError, ScheduleError: see `interval`.
    """
    at = interval(sample_BX, velocity_BX, sigmas_T1, step)
    zero_B = torch.zeros_like(at.sigma_B)
    return GaussianStep(flow_ode_step(at.x_BX, at.v_BX, sigmas_T1, step), zero_B, zero_B)
