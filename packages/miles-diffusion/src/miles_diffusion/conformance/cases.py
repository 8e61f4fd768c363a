"""What each golden case computes, in float64, through the public functions. What is absent here is not built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from miles_diffusion.errors import UndefinedLogProbError
from miles_diffusion.samplers.dance import dance_step
from miles_diffusion.samplers.flow_cps import flow_cps_step
from miles_diffusion.samplers.flow_ode import flow_ode_transition
from miles_diffusion.samplers.flow_sde import flow_sde_step
from miles_diffusion.samplers.transition import GaussianStep
from miles_diffusion.schedules import shifted_sigmas

NOT_BUILT = "not built"
RELATIVE_TOLERANCE = 1e-10
ABSOLUTE_TOLERANCE = 1e-12

Check = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]


def numbered_cases(content: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Id and content of each case of a file: `name[i]`, or `name[i][j]` where cases hold cases."""
    for i, case in enumerate(content["cases"]):
        if "cases" not in case:
            yield f"{name}[{i}]", case
            continue
        for j, nested in enumerate(case["cases"]):
            yield f"{name}[{i}][{j}]", nested


def check_case(base_name: str, content: Mapping[str, Any], case: Mapping[str, Any]) -> str | None:
    """Why a case of the file `base_name` with `content` fails; None when it passes."""
    check = _CHECKS.get(base_name)
    return check(content, case) if check else NOT_BUILT


def _check_schedule(_: Mapping[str, Any], case: Mapping[str, Any]) -> str | None:
    grid = shifted_sigmas(case["num_steps"], case["shift"], dtype=torch.float64)
    return _difference("sigmas", grid, case["sigmas"])


def _check_step(content: Mapping[str, Any], case: Mapping[str, Any]) -> str | None:
    step = _step(content, case)
    noise, following = _tensor(case["noise"]), _tensor(case["x_next"])
    expect = case["expect"]
    results = {
        "prev_sample_mean": step.mean_BX,
        "std_dev_t": step.std_dev_t_B,
        "noise_std": step.noise_std_B,
        "log_prob": _log_prob(step, following),
        "log_prob_no_const": step.log_prob_no_const(following),
    }
    unknown = sorted(set(expect) - set(results))
    if unknown:
        return f"nothing computed for {', '.join(unknown)}"
    differences = [_difference(key, results[key], value) for key, value in expect.items()]
    differences.append(_difference("x_next", step.sample(noise), case["x_next"]))
    return next((difference for difference in differences if difference), None)


def _step(content: Mapping[str, Any], case: Mapping[str, Any]) -> GaussianStep:
    x, v = _tensor(case["x"]), _tensor(case["v"])
    sigmas, index, level = _tensor(content["sigmas"]), case["step_index"], case["noise_level"]
    if case["kind"] == "ode":
        return flow_ode_transition(x, v, sigmas, index)
    return _NOISY_STEPS[case["kind"]](x, v, sigmas, index, noise_level=level)


def _log_prob(step: GaussianStep, following: torch.Tensor) -> torch.Tensor | None:
    try:
        return step.log_prob(following)
    except UndefinedLogProbError:
        return None


def _difference(key: str, result: torch.Tensor | None, expected: Any) -> str | None:
    """Numbers are compared within the tolerance; an expected single number stands for every sample."""
    if result is None or expected is None:
        return None if result is expected else f"{key} is {result}, expected {expected}"
    wanted = _tensor(expected)
    if wanted.dim() and wanted.shape != result.shape:
        return f"{key} has shape {tuple(result.shape)}, expected {tuple(wanted.shape)}"
    error = (result - wanted).abs()
    bound = ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * wanted.abs()
    if bool((error <= bound).all()):
        return None
    return f"{key} is off by up to {error.max().item():.3g}, allowed {RELATIVE_TOLERANCE} relative"


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


_NOISY_STEPS: Mapping[str, Callable[..., GaussianStep]] = MappingProxyType(
    {"sde": flow_sde_step, "cps": flow_cps_step, "dance": dance_step}
)
_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "sde_step": _check_step,
        "video5d_sde_step": _check_step,
        "cps_step": _check_step,
        "ode_dance_step": _check_step,
        "sigma_schedule": _check_schedule,
    }
)
