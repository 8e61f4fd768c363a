"""Checkpoints: bitwise resume, nothing half written, and errors that are errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_trainer import CheckpointError, Trainer, TrainerConfig
from miles_trainer.checkpoint import complete_checkpoints, latest
from miles_trainer.testing import make_samples

CONFIG = TrainerConfig.model_validate(
    {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 3}, "n_updates_per_batch": 2}
)
SCRIPT = Path(__file__).parent / "scripts" / "save_and_die.py"


def _train(trainer: Trainer, steps: range) -> None:
    for step in steps:
        trainer.train(make_samples(seed=step, version=step), step=step)


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = {name: p.detach().clone() for name, p in trainer.backend.parameters.items()}
    for kind, moments in trainer.backend.moments().items():
        state |= {f"{kind}.{name}": tensor.clone() for name, tensor in moments.items()}
    return state


@pytest.mark.parametrize("kind", ["dense_dir", "moe_dir"])
def test_resuming_gives_the_bits_of_a_run_without_interruption(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    with Trainer(CONFIG, folder) as trainer:
        _train(trainer, range(2))
        path = trainer.save(tmp_path, extra={"drawn": [1, 2]})
        _train(trainer, range(2, 4))
        expected, counters = _state(trainer), trainer.state
    with Trainer(CONFIG, folder) as trainer:
        assert trainer.load(tmp_path) == {"drawn": [1, 2]}
        assert trainer.version == 2
        _train(trainer, range(2, 4))
        assert trainer.state == counters
        resumed = _state(trainer)
    assert path.name == "step_0000002"
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_loading_restores_the_random_state(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        trainer.save(tmp_path)
        drawn = torch.rand(3)
        trainer.load(tmp_path)
        assert torch.equal(torch.rand(3), drawn)


def test_a_save_before_the_first_update_loads(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        trainer.save(tmp_path)
        _train(trainer, range(1))
        trainer.load(tmp_path)
        assert trainer.version == 0
        assert not trainer.backend.moments()["exp_avg"]
        _train(trainer, range(1))


@pytest.mark.parametrize(
    ("point", "survivor"),
    [
        ("model.safetensors", 1),
        ("exp_avg_sq.safetensors", 1),
        (".complete", 1),
        ("set aside", 1),
        ("renamed", 2),
    ],
)
def test_death_while_saving_leaves_a_complete_checkpoint(
    dense_dir: Path, tmp_path: Path, point: str, survivor: int
) -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), str(dense_dir), str(tmp_path), point], timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    assert latest(tmp_path).name.endswith(f"step_{survivor:07d}")
    with Trainer(TrainerConfig(), dense_dir) as trainer:
        trainer.load(tmp_path)
        assert trainer.version == survivor
        trainer.train(make_samples(version=trainer.version), step=trainer.version)
        trainer.save(tmp_path)
        assert latest(tmp_path).name == f"step_{survivor + 1:07d}"


def test_old_checkpoints_go_and_a_repeated_version_is_replaced(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        for step in range(3):
            trainer.save(tmp_path, extra={"try": 1})
            trainer.save(tmp_path, extra={"try": 2})
            _train(trainer, range(step, step + 1))
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_0000001", "step_0000002"]
        assert trainer.load(tmp_path / "step_0000001") == {"try": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000001", "step_0000002"]


def test_other_options_are_named_and_refused_unless_allowed(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        trainer.save(tmp_path)
    other = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"learning_rate": 5.0})})
    with Trainer(other, dense_dir) as trainer:
        with pytest.raises(CheckpointError, match=r"optimizer.learning_rate: 0.001 → 5.0"):
            trainer.load(tmp_path)
        trainer.load(tmp_path, allow_config_change=True)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "marker", "schema", "state"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_changed(dense_dir: Path, tmp_path: Path, damage: str) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        _train(trainer, range(1))
        path = trainer.save(tmp_path)
        _train(trainer, range(1, 2))
        before = _state(trainer)
        _damage(path, damage)
        with pytest.raises(CheckpointError):
            trainer.load(path)
        assert all(torch.equal(before[name], tensor) for name, tensor in _state(trainer).items())
        assert trainer.version == 2


def _damage(path: Path, damage: str) -> None:
    file = path / "exp_avg.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "marker":
        (path / ".complete").unlink()
    elif damage == "schema":
        state = path / "state.json"
        state.write_text(state.read_text().replace("checkpoint/1", "checkpoint/9"))
    else:
        (path / "state.json").write_text("{")


def test_a_checkpoint_of_another_model_is_refused(dense_dir: Path, moe_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, moe_dir) as trainer:
        trainer.save(tmp_path)
    with Trainer(CONFIG, dense_dir) as trainer, pytest.raises(CheckpointError, match="tensors differ from the model"):
        trainer.load(tmp_path)


def test_an_absent_checkpoint_is_an_error(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer, pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer.load(tmp_path)


def test_a_failed_save_is_an_error_and_keeps_the_last_one(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        trainer.save(tmp_path)
        _train(trainer, range(1))
        (tmp_path / ".writing-step_0000001").write_text("in the way")
        with pytest.raises(CheckpointError, match="could not be written"):
            trainer.save(tmp_path)
        with pytest.raises(CheckpointError, match="could not be written"):
            trainer.save(tmp_path, extra={"no json": object()})
        assert latest(tmp_path).name == "step_0000000"
