"""The tiny run learns, and learns nothing from shuffled rewards. One seed each in the tests, all in `evidence`."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path

import pytest

from miles.run_folder import read_jsonl

QUESTIONS = 128
NOISE = 3.0
"""Standard errors of the difference of two proportions that count as beyond noise."""


def held_out(folder: Path) -> tuple[float, float]:
    before, after = (row["heldout/success"] for row in read_jsonl(folder / "metrics.jsonl") if "heldout/success" in row)
    return before, after


def standard_error(before: float, after: float) -> float:
    return sqrt((before * (1 - before) + after * (1 - after)) / QUESTIONS)


def seeds(in_tests: int) -> list[object]:
    return [pytest.param(seed, marks=() if seed < in_tests else pytest.mark.evidence) for seed in range(3)]


@pytest.mark.verifies("transformers", "an unmodified Qwen3-MoE model learns in the whole loop")
@pytest.mark.parametrize("seed", seeds(in_tests=1))
def test_held_out_success_rises_beyond_noise(run_tiny: Callable[..., Path], seed: int) -> None:
    before, after = held_out(run_tiny(loop__seed=seed, task__held_out=QUESTIONS))
    print(f"seed {seed}: held-out success {before:.3f} → {after:.3f} of {QUESTIONS}")
    assert after - before > NOISE * standard_error(before, after)


@pytest.mark.parametrize("seed", seeds(in_tests=1))
def test_shuffled_rewards_teach_nothing(run_tiny: Callable[..., Path], seed: int) -> None:
    before, after = held_out(run_tiny(loop__seed=seed, task__held_out=QUESTIONS, task__shuffle_rewards=True))
    print(f"seed {seed}, shuffled: held-out success {before:.3f} → {after:.3f} of {QUESTIONS}")
    assert after - before < NOISE * standard_error(before, after)
