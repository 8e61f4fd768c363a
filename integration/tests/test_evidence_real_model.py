"""The quick start as shipped: the real model learns in every seed, also in words it was never trained on; shuffled
rewards teach nothing."""

from __future__ import annotations

import asyncio
from math import sqrt
from pathlib import Path

import pytest

from miles.layers import Setting, from_file, resolve
from miles.run import run_training
from miles.run_folder import read_jsonl
from miles.ui import Silent

QUICKSTART = Path(__file__).parents[1] / "src" / "miles" / "recipes" / "quickstart.toml"
NOISE = 3.0

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(1800)]


def held_out(folder: Path, **changes: object) -> tuple[dict[str, float], dict[str, float]]:
    """The rows of the held-out questions before and after a run."""
    settings = [Setting(tuple(name.split("__")), value, "test") for name, value in changes.items()]
    asyncio.run(run_training(resolve([*from_file(QUICKSTART), *settings]), folder, Silent()))
    before, after = (row for row in read_jsonl(folder / "metrics.jsonl") if "heldout/success" in row)
    return before, after


def rise(name: str, before: dict[str, float], after: dict[str, float]) -> float:
    """The difference of success on a set, in standard errors."""
    count = before[f"heldout/{name}/questions"]
    low, high = before[f"heldout/{name}/success"], after[f"heldout/{name}/success"]
    print(f"{name}: {low:.3f} → {high:.3f} of {count:.0f}")
    return (high - low) / max(sqrt((low * (1 - low) + high * (1 - high)) / count), 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_real_model_learns_beyond_noise(tmp_path: Path, seed: int) -> None:
    before, after = held_out(tmp_path / "run", loop__seed=seed)
    assert rise("numbers", before, after) > NOISE
    assert rise("wording", before, after) > NOISE


def test_shuffled_rewards_teach_the_real_model_nothing(tmp_path: Path) -> None:
    before, after = held_out(tmp_path / "run", task__shuffle_rewards=True)
    assert rise("numbers", before, after) < NOISE
    assert rise("wording", before, after) < NOISE
