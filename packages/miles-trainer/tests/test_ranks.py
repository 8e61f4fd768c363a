"""Two ranks compute what one computes: gradients, metrics, scores, exports, and resuming on another number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from miles_trainer import RankError
from miles_trainer.distributed import RankGroup
from miles_trainer.testing import run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "train_ranks.py"
CONFIG = {
    "optimizer": {"learning_rate": 1e-3, "clip_grad_norm": 0.5},
    "packing": {"max_tokens": 40},
    "replay": {"enabled": True},
    "objective": {"kl": {"coef": 0.05}, "entropy_coef": 0.01},
    "checkpoint": {"keep": 5},
}


def _run(model: Path, out: Path, world_size: int, resume: str = "") -> list[list[dict[str, Any]]]:
    outputs = run_ranks(
        SCRIPT, [str(model), str(out), json.dumps(CONFIG), resume], world_size=world_size, timeout_s=100
    )
    return [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]


@pytest.fixture(scope="module")
def runs(moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[list[dict[str, Any]]]]]:
    folders = {n: tmp_path_factory.mktemp(f"ranks{n}") for n in (1, 2)}
    return {n: (folder, _run(moe_dir, folder, n)) for n, folder in folders.items()}


def _relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    gap = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return float((gap / sum(float(x.double().square().sum()) for x in a.values())) ** 0.5)


def test_gradients_of_one_and_two_ranks_agree(runs: dict[int, tuple[Path, Any]]) -> None:
    """The first moment after one step is the clipped gradient times 1 - beta1."""
    one, two = (load_file(runs[n][0] / "step_0000001" / "exp_avg.safetensors") for n in (1, 2))
    assert _relative(one, two) <= 1e-6


@pytest.mark.verifies("torch", "two ranks of FSDP2 over gloo end with the weights of one")
def test_weights_after_two_steps_agree(runs: dict[int, tuple[Path, Any]]) -> None:
    one, two = (load_file(runs[n][0] / "step_0000002" / "model.safetensors") for n in (1, 2))
    assert _relative(one, two) <= 1e-5


def test_every_rank_reports_what_a_single_one_reports(runs: dict[int, tuple[Path, Any]]) -> None:
    alone, first, second = runs[1][1][0], *runs[2][1]
    assert first[:3] == second[:3]
    for single, double in zip(alone[:2], first[:2], strict=True):
        for name, value in single["metrics"].items():
            assert double["metrics"][name] == pytest.approx(value, rel=2e-4, abs=2e-6), name
    for single_row, double_row in zip(alone[2]["scores"], first[2]["scores"], strict=True):
        assert double_row == pytest.approx(single_row, rel=1e-4, abs=1e-5)


def test_only_rank_zero_exports_and_all_ranks_get_as_many_lists(runs: dict[int, tuple[Path, Any]]) -> None:
    source, other = (output[-1]["lists"] for output in runs[2][1])
    assert sum(source) > 0
    assert other == [0] * len(source)
    one, two = (load_file(runs[n][0] / "hf" / "model.safetensors") for n in (1, 2))
    assert _relative(one, two) <= 1e-5


def test_a_checkpoint_of_one_rank_resumes_on_two(
    runs: dict[int, tuple[Path, Any]], moe_dir: Path, tmp_path: Path
) -> None:
    outputs = _run(moe_dir, tmp_path, 2, resume=str(runs[1][0] / "step_0000001"))
    assert outputs[0][0] == {"extra": {"drawn": 1}}
    resumed = load_file(tmp_path / "step_0000002" / "model.safetensors")
    assert _relative(load_file(runs[1][0] / "step_0000002" / "model.safetensors"), resumed) <= 1e-5


def test_a_group_that_cannot_form_says_who_waited_for_whom() -> None:
    with pytest.raises(RankError, match="need init_method"):
        RankGroup(0, 2, timeout_s=1)
    with pytest.raises(RankError, match="rank 2 is outside 0 … 1"):
        RankGroup(2, 2, init_method="tcp://127.0.0.1:1", timeout_s=1)
    with pytest.raises(RankError, match="could not join"):
        RankGroup(1, 2, init_method="tcp://127.0.0.1:1", timeout_s=1)
