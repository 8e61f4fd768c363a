"""The Gaussian step that all stochastic samplers share: a mean, a standard deviation, and densities under them.

Shapes: B samples; X the latent axes (channel, height, width, or channel, frame, height, width); T denoising steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from miles_diffusion.errors import LatentError, ScheduleError, UndefinedLogProbError


@dataclass(frozen=True, slots=True)
class GaussianStep:
    """The distribution of the next latent: normal around `mean_BX` with standard deviation `noise_std_B`.

    All fields are float32, or float64 when the latents are.

    Attributes:
        mean_BX: mean of the next latent.
        std_dev_t_B: standard deviation a unit of time; KL terms divide by it (without `sqrt(-dt)`).
        noise_std_B: standard deviation of the step itself.
    """

    mean_BX: torch.Tensor
    std_dev_t_B: torch.Tensor
    noise_std_B: torch.Tensor

    def sample(self, noise_BX: torch.Tensor) -> torch.Tensor:
        """The next latent for standard normal noise, [B, X].

        Raises:
            LatentError: the noise has another shape than the latents.
        """
        _require_same_shape("noise", noise_BX, self.mean_BX)
        return self.mean_BX + _over_latent(self.noise_std_B, self.mean_BX) * noise_BX.to(self.mean_BX.dtype)

    def log_prob(self, next_BX: torch.Tensor) -> torch.Tensor:
        """Log-density of `next_BX`, averaged (not summed) over the latent axes: [B]. `next_BX` carries no gradient.

        `mean(-(x' - mean)^2 / (2 std^2) - ln std - ln sqrt(2 pi))`.

        Raises:
            UndefinedLogProbError: a step without noise has no density.
            LatentError: `next_BX` has another shape than the latents.
        """
        if not bool((self.noise_std_B > 0).all()):
            raise UndefinedLogProbError(
                f"noise_std is {self.noise_std_B.tolist()}: a step without noise has no density; "
                "use log_prob_no_const, or leave this step out of the trained window"
            )
        variance_B = self.noise_std_B**2
        constant_B = torch.log(self.noise_std_B) + 0.5 * math.log(2 * math.pi)
        return self.log_prob_no_const(next_BX) / (2 * variance_B) - constant_B

    def log_prob_no_const(self, next_BX: torch.Tensor) -> torch.Tensor:
        """`mean(-(x' - mean)^2)` over the latent axes: [B]. Defined without noise too. `next_BX` carries no gradient.

        Raises:
            LatentError: `next_BX` has another shape than the latents.
        """
        _require_same_shape("the next latent", next_BX, self.mean_BX)
        squares_BX = (next_BX.detach().to(self.mean_BX.dtype) - self.mean_BX) ** 2
        return -squares_BX.flatten(start_dim=1).mean(dim=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """Inputs of one step, upcast to the dtype that samplers compute in: float32, or float64 for float64 latents.

    Attributes:
        x_BX: present latent.
        v_BX: predicted velocity.
        sigma_B: sigma now.
        sigma_next_B: sigma of the next latent.
        sigma_second: second sigma of the schedule, the stand-in for a first sigma of 1 where `1 - sigma` divides.
    """

    x_BX: torch.Tensor
    v_BX: torch.Tensor
    sigma_B: torch.Tensor
    sigma_next_B: torch.Tensor
    sigma_second: torch.Tensor

    @property
    def dt_B(self) -> torch.Tensor:
        """Step in sigma, negative."""
        return self.sigma_next_B - self.sigma_B

    def over_latent(self, values_B: torch.Tensor) -> torch.Tensor:
        """[B] as [B, 1, ...], to broadcast against latents."""
        return _over_latent(values_B, self.x_BX)


def interval(
    sample_BX: torch.Tensor, velocity_BX: torch.Tensor, sigmas_T1: torch.Tensor, step: int | torch.Tensor
) -> Interval:
    """Check and upcast the inputs of a step.

    Args:
        sample_BX: latents, any float dtype; at least one latent axis.
        velocity_BX: predicted velocities of the same shape.
        sigmas_T1: the schedule [T + 1], falling; take the one that the rollout used, not a recomputed one.
        step: 0-based step of the denoising loop, one for all samples or an integer tensor [B].

    Raises:
        LatentError: shapes differ, or there is no latent axis.
        ScheduleError: the schedule is not falling from at most 1, or a step lies outside it.
    """
    _require_same_shape("velocity", velocity_BX, sample_BX)
    if sample_BX.dim() < 2:
        raise LatentError(
            f"latents have shape {tuple(sample_BX.shape)}: a batch axis and at least one latent axis needed"
        )
    dtype = torch.float64 if sample_BX.dtype == torch.float64 else torch.float32
    _require_schedule(sigmas_T1)
    sigmas = sigmas_T1.to(device=sample_BX.device, dtype=dtype)
    step_B = _steps(step, sample_BX, len(sigmas) - 1)
    return Interval(sample_BX.to(dtype), velocity_BX.to(dtype), sigmas[step_B], sigmas[step_B + 1], sigmas[1])


def _require_schedule(sigmas_T1: torch.Tensor) -> None:
    if sigmas_T1.dim() != 1 or len(sigmas_T1) < 2:
        raise ScheduleError(
            f"sigmas have shape {tuple(sigmas_T1.shape)}: a schedule is [steps + 1], terminal 0 included"
        )
    falling = bool((sigmas_T1[1:] < sigmas_T1[:-1]).all())
    # Engines snapshot float32 sigmas, whose first value may stand an ulp above 1.
    if not falling or not 0 <= float(sigmas_T1[-1]) < float(sigmas_T1[0]) <= 1 + 1e-6:
        raise ScheduleError(f"sigmas {sigmas_T1.tolist()} do not fall from at most 1 to at least 0")


def _steps(step: int | torch.Tensor, sample_BX: torch.Tensor, num_steps: int) -> torch.Tensor:
    batch = sample_BX.shape[0]
    step_B = torch.as_tensor(step, device=sample_BX.device, dtype=torch.int64)
    if step_B.dim() == 0:
        step_B = step_B.expand(batch)
    if step_B.shape != (batch,):
        raise ScheduleError(f"steps have shape {tuple(step_B.shape)}: one for all {batch} samples, or one each")
    if bool(((step_B < 0) | (step_B >= num_steps)).any()):
        raise ScheduleError(f"step {step_B.tolist()} outside a schedule of {num_steps} steps (counted from 0)")
    return step_B


def _over_latent(values_B: torch.Tensor, like_BX: torch.Tensor) -> torch.Tensor:
    return values_B.reshape(-1, *[1] * (like_BX.dim() - 1))


def _require_same_shape(what: str, tensor: torch.Tensor, latent_BX: torch.Tensor) -> None:
    if tensor.shape != latent_BX.shape:
        raise LatentError(f"{what} has shape {tuple(tensor.shape)}, the latents have {tuple(latent_BX.shape)}")
