"""The public surface, and what importing it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import miles_trainer


def test_every_public_name_is_there() -> None:
    assert sorted(miles_trainer.__all__) == miles_trainer.__all__
    for name in miles_trainer.__all__:
        assert getattr(miles_trainer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        miles_trainer.Trainr  # noqa: B018


def test_errors_are_trainer_errors_and_what_they_replace() -> None:
    for name in miles_trainer.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(miles_trainer, name), miles_trainer.TrainerError)
    assert issubclass(miles_trainer.CheckpointError, ValueError)
    assert issubclass(miles_trainer.RankError, RuntimeError)


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, miles_trainer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
