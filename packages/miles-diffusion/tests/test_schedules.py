from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_diffusion import ScheduleError, shifted_sigmas


@given(num_steps=st.integers(1, 60), shift=st.floats(0.1, 20))
def test_the_grid_falls_from_one_to_zero(num_steps: int, shift: float):
    sigmas = shifted_sigmas(num_steps, shift, dtype=torch.float64)
    assert sigmas.shape == (num_steps + 1,)
    assert (sigmas[0].item(), sigmas[-1].item()) == (pytest.approx(1.0), 0.0)
    assert bool((sigmas[1:] < sigmas[:-1]).all())


def test_no_shift_leaves_the_grid_even():
    assert shifted_sigmas(4, 1.0).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_float32_is_one_rounding_of_float64():
    assert torch.equal(shifted_sigmas(16, 5.0), shifted_sigmas(16, 5.0, dtype=torch.float64).float())


@pytest.mark.parametrize(("num_steps", "shift"), [(0, 3.0), (4, 0.0), (4, -1.0), (4, float("nan"))])
def test_impossible_grids_are_refused(num_steps: int, shift: float):
    with pytest.raises(ScheduleError):
        shifted_sigmas(num_steps, shift)
