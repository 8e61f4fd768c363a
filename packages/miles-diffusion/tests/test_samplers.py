from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_diffusion import (
    GaussianStep,
    LatentError,
    ScheduleError,
    UndefinedLogProbError,
    dance_step,
    flow_cps_step,
    flow_ode_step,
    flow_ode_transition,
    flow_sde_step,
    shifted_sigmas,
)

NOISY = [flow_sde_step, flow_cps_step, dance_step]
noisy = pytest.mark.parametrize("step", NOISY)
IMAGE, VIDEO = (3, 2, 4, 4), (3, 2, 5, 4, 4)
SIGMAS = shifted_sigmas(10, 3.0, dtype=torch.float64)


def latents(shape: tuple[int, ...] = IMAGE, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))


@noisy
@pytest.mark.parametrize("shape", [IMAGE, VIDEO])
def test_log_prob_is_the_mean_normal_density(step: Any, shape: tuple[int, ...]):
    x, v, noise = latents(shape)
    at = step(x, v, SIGMAS, 4, noise_level=0.7)
    following = at.sample(noise)
    std = at.noise_std_B.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    density = torch.distributions.Normal(at.mean_BX, std).log_prob(following)
    assert torch.allclose(at.log_prob(following), density.flatten(1).mean(1), rtol=1e-12)


@noisy
def test_without_noise_level_the_mean_is_the_ode_step(step: Any):
    x, v, _ = latents()
    for index in range(10):
        at = step(x, v, SIGMAS, index, noise_level=0.0)
        assert torch.allclose(at.mean_BX, flow_ode_step(x, v, SIGMAS, index), rtol=0, atol=1e-14)
        assert at.noise_std_B.tolist() == [0.0] * 3


@noisy
@given(index=st.integers(0, 8), seed=st.integers(0, 20))
def test_a_batch_of_mixed_steps_is_its_rows(step: Any, index: int, seed: int):
    x, v, noise = latents(seed=seed)
    steps = torch.tensor([index, 8 - index, 0])
    together = step(x, v, SIGMAS, steps, noise_level=0.7)
    for row in range(3):
        alone = step(x[row : row + 1], v[row : row + 1], SIGMAS, int(steps[row]), noise_level=0.7)
        assert torch.equal(together.mean_BX[row : row + 1], alone.mean_BX)
        assert torch.equal(together.sample(noise)[row : row + 1], alone.sample(noise[row : row + 1]))


@noisy
def test_low_precision_latents_are_computed_in_float32(step: Any):
    x, v, noise = latents(dtype=torch.bfloat16)
    at = step(x, v, SIGMAS, 3, noise_level=0.7)
    same = step(x.float(), v.float(), SIGMAS, 3, noise_level=0.7)
    assert at.mean_BX.dtype == torch.float32
    assert torch.equal(at.mean_BX, same.mean_BX)
    assert torch.equal(at.log_prob(noise), same.log_prob(noise.float()))


@noisy
def test_float32_stays_close_to_float64(step: Any):
    x, v, noise = latents()
    for index in range(9):
        exact = step(x, v, SIGMAS, index, noise_level=0.7)
        rough = step(x.float(), v.float(), SIGMAS.float(), index, noise_level=0.7)
        assert torch.allclose(rough.mean_BX.double(), exact.mean_BX, rtol=2e-5, atol=1e-5)
        following = exact.sample(noise)
        assert torch.allclose(rough.log_prob(following.float()).double(), exact.log_prob(following), rtol=0, atol=1e-4)


@noisy
def test_gradients_reach_the_velocity_and_not_the_next_latent(step: Any):
    x, v, noise = latents()
    v.requires_grad_()
    at = step(x, v, SIGMAS, 4, noise_level=0.7)
    at.log_prob(at.sample(noise)).sum().backward()
    assert bool((v.grad.abs() > 0).any())
    following = at.sample(noise).detach().requires_grad_()
    assert not step(x, v.detach(), SIGMAS, 4, noise_level=0.7).log_prob(following).requires_grad


def test_a_first_sigma_of_one_takes_the_second_in_the_denominator():
    x, v, _ = latents()
    at = flow_sde_step(x, v, SIGMAS, 0, noise_level=1.0)
    assert at.std_dev_t_B[0].item() == pytest.approx(math.sqrt(1 / (1 - SIGMAS[1].item())))


def test_a_first_sigma_an_ulp_off_one_is_treated_as_one():
    x, v, _ = latents(dtype=torch.float32)
    for neighbour in (0.0, 2.0):
        sigmas = shifted_sigmas(10, 3.0)
        sigmas[0] = torch.nextafter(sigmas[0], torch.tensor(neighbour))
        at = flow_sde_step(x, v, sigmas, 0, noise_level=1.0)
        assert at.std_dev_t_B[0].item() == pytest.approx(math.sqrt(1 / (1 - sigmas[1].item())), rel=1e-6)


def test_sde_noise_follows_the_length_of_the_step():
    x, v, _ = latents()
    at = flow_sde_step(x, v, SIGMAS, 5, noise_level=0.7)
    dt = SIGMAS[6] - SIGMAS[5]
    assert torch.allclose(at.noise_std_B, at.std_dev_t_B * torch.sqrt(-dt), rtol=1e-14)


def test_cps_keeps_the_noise_coefficient_of_the_schedule():
    x, v, _ = latents()
    at = flow_cps_step(x, v, SIGMAS, 4, noise_level=0.6)
    noise_share = SIGMAS[5] * math.cos(0.6 * math.pi / 2)
    clean, noise = x - SIGMAS[4] * v, x + (1 - SIGMAS[4]) * v
    assert torch.allclose(at.mean_BX, (1 - SIGMAS[5]) * clean + noise_share * noise, rtol=1e-12)


def test_the_last_cps_step_has_no_density_and_no_gradient():
    x, v, noise = latents()
    v.requires_grad_()
    at = flow_cps_step(x, v, SIGMAS, 9, noise_level=0.7)
    with pytest.raises(UndefinedLogProbError, match="leave this step out"):
        at.log_prob(at.sample(noise))
    log_prob = at.log_prob_no_const(at.sample(noise))
    log_prob.sum().backward()
    assert log_prob.tolist() == [0.0] * 3
    assert bool((v.grad == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_ode_step_keeps_the_dtype(dtype: torch.dtype):
    x, v, noise = latents(dtype=dtype)
    following = flow_ode_step(x, v, SIGMAS, 2)
    assert following.dtype == dtype
    assert (
        flow_ode_transition(x, v, SIGMAS, 2).log_prob_no_const(flow_ode_transition(x, v, SIGMAS, 2).sample(noise))[0]
        == 0
    )


def test_following_the_true_velocity_ends_at_the_data():
    data, noise, _ = latents()
    x = noise.clone()
    for index in range(10):
        x = flow_ode_step(x, noise - data, SIGMAS, index)
    assert torch.allclose(x, data, atol=1e-12)


@pytest.mark.parametrize(
    ("step", "level"), [(flow_sde_step, -0.1), (dance_step, -1.0), (flow_cps_step, 1.1), (flow_sde_step, math.nan)]
)
def test_noise_levels_outside_their_range_are_refused(step: Any, level: float):
    x, v, _ = latents()
    with pytest.raises(ScheduleError, match="noise_level"):
        step(x, v, SIGMAS, 0, noise_level=level)


@pytest.mark.parametrize("index", [-1, 10, torch.tensor([0, 1, 10]), torch.tensor([0, 1])])
def test_steps_outside_the_schedule_are_refused(index: Any):
    x, v, _ = latents()
    with pytest.raises(ScheduleError, match="step"):
        flow_sde_step(x, v, SIGMAS, index, noise_level=0.7)


@pytest.mark.parametrize("sigmas", [[1.0], [0.0, 1.0], [1.0, 1.0, 0.0], [2.0, 0.0], [1.0, -0.1], [[1.0, 0.0]]])
def test_schedules_that_do_not_fall_are_refused(sigmas: list[Any]):
    x, v, _ = latents()
    with pytest.raises(ScheduleError, match="sigmas"):
        flow_sde_step(x, v, torch.tensor(sigmas), 0, noise_level=0.7)


def test_shapes_that_would_broadcast_silently_are_refused():
    x, v, noise = latents()
    with pytest.raises(LatentError, match="velocity has shape"):
        flow_sde_step(x, v[:1], SIGMAS, 0, noise_level=0.7)
    at = flow_sde_step(x, v, SIGMAS, 0, noise_level=0.7)
    with pytest.raises(LatentError, match="noise has shape"):
        at.sample(noise[:1])
    with pytest.raises(LatentError, match="the next latent has shape"):
        at.log_prob(noise[:1])
    with pytest.raises(LatentError, match="latent axis"):
        flow_sde_step(torch.zeros(3), torch.zeros(3), SIGMAS, 0, noise_level=0.7)


def test_a_step_is_plain_data():
    step = GaussianStep(torch.zeros(1, 1), torch.zeros(1), torch.ones(1))
    with pytest.raises(AttributeError):
        step.mean_BX = torch.ones(1, 1)  # type: ignore[misc]
