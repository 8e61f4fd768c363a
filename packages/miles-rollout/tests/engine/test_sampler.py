"""The sampler: distribution, truncation, and draws that depend on seed and index only."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_rollout.local.sampler import Draw, sample, uniform

SEEDS = st.integers(0, 2**64 - 1)


def test_draws_follow_the_softmax() -> None:
    """Pearson's chi-square over 40 ids, 8000 draws, fixed seeds: 39 degrees of freedom, 0.1 % point 72.1."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(40, generator=generator)
    n = 8000
    ids, _ = sample(logits_V.expand(n, -1), [Draw(0.7, 1.0, -1, seed, 0) for seed in range(n)])
    expected_V = n * torch.softmax(logits_V.double() / 0.7, 0)
    found_V = torch.bincount(torch.tensor(ids), minlength=40)
    chi_square = float(((found_V - expected_V) ** 2 / expected_V).sum())
    assert 14.0 < chi_square < 72.1


def test_successive_draws_of_one_seed_are_uniform() -> None:
    """16 cells, 4000 draws of one stream: 15 degrees of freedom, 0.1 % point 37.7."""
    cells = torch.bincount(torch.tensor([int(uniform(9, k) * 16) for k in range(4000)]), minlength=16)
    assert float(((cells - 250) ** 2 / 250).sum()) < 37.7


@given(SEEDS, st.integers(0, 10_000))
def test_a_draw_is_a_function_of_seed_and_index(seed: int, index: int) -> None:
    assert uniform(seed, index) == uniform(seed, index)
    assert 0.0 <= uniform(seed, index) < 1.0


@given(SEEDS, st.floats(0.1, 3.0), st.floats(0.05, 1.0), st.sampled_from([-1, 1, 2, 5]))
def test_neighbours_change_neither_id_nor_logprob(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    logits_MV = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed % 1000))
    draws = [Draw(1.0, 1.0, -1, 1, 0), Draw(temperature, top_p, top_k, seed, 3), Draw(0.0, 1.0, -1, 0, 0)]
    (alone_id,), (alone_logprob,) = sample(logits_MV[1:2], draws[1:2])
    ids, logprobs = sample(logits_MV[:3], draws)
    assert (ids[1], logprobs[1]) == (alone_id, alone_logprob)


def test_the_logprob_is_taken_before_truncation_and_after_temperature() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0])
    ids, logprobs = sample(logits_V[None], [Draw(0.5, 0.1, 1, 3, 0)])
    assert ids == [0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits_V / 0.5, 0)[0]))


@pytest.mark.parametrize(
    ("top_p", "top_k", "allowed"),
    [(1.0, 2, {0, 1}), (0.6, -1, {0, 1}), (0.4, -1, {0}), (0.99, 3, {0, 1, 2}), (1e-6, -1, {0})],
)
def test_truncation_keeps_the_most_probable_ids(top_p: float, top_k: int, allowed: set[int]) -> None:
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    ids, _ = sample(logits_V.expand(400, -1), [Draw(1.0, top_p, top_k, seed, 0) for seed in range(400)])
    assert set(ids) == allowed


def test_greedy_reports_the_logprob_at_temperature_one() -> None:
    logits_V = torch.tensor([0.0, 3.0, 1.0])
    ids, logprobs = sample(logits_V[None], [Draw(0.0, 1.0, -1, 0, 0)])
    assert ids == [1]
    assert math.exp(logprobs[0]) == pytest.approx(float(torch.softmax(logits_V, 0)[1]))
