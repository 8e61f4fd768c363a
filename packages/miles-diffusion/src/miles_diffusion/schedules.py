"""Sigma schedules. Shapes: T denoising steps; a schedule has T + 1 values, from 1 (noise) down to 0 (data)."""

from __future__ import annotations

import torch

from miles_diffusion.errors import ScheduleError


def shifted_sigmas(num_steps: int, shift: float, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The shifted flow-matching grid, [num_steps + 1], computed in float64 and rounded once to `dtype`.

    `t = linspace(1, 1/n, n)`, `sigma = shift t / (1 + (shift - 1) t)`, then 0. Large images use a larger shift, which
    keeps more of the steps at high noise.

    Raises:
        ScheduleError: `num_steps` below 1 or `shift` not positive.
    """
    if num_steps < 1:
        raise ScheduleError(f"num_steps is {num_steps}: a schedule has at least one step")
    if not shift > 0:
        raise ScheduleError(f"shift is {shift}: it must be above 0, and 1 leaves the grid unshifted")
    t_T = torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64)
    sigmas_T = shift * t_T / (1 + (shift - 1) * t_T)
    return torch.cat([sigmas_T, sigmas_T.new_zeros(1)]).to(dtype)
