"""The command: real runs on a tiny model, one clear line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from miles_trainer.cli import main
from miles_trainer.sources import SyntheticSource
from miles_trainer.testing import TINY_VOCABULARY


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command in this process."""

    def called(*arguments: str) -> Outcome:
        code = 0
        try:
            main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Outcome(code, capsys.readouterr().err)

    return called


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = SyntheticSource(vocab_size=TINY_VOCABULARY, steps=3, groups=1, tokens=12)
    lines = []
    while (batch := source.next_batch()) is not None:
        for s in batch:
            lines.append(
                json.dumps(
                    {
                        "group_id": s.group_id,
                        "rollout_id": s.rollout_id,
                        "token_ids": s.token_ids.tolist(),
                        "loss_mask": s.loss_mask.tolist(),
                        "logprobs": s.logprobs.tolist(),
                        "reward": s.reward,
                    }
                )
            )
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_train_resume_and_export(run: Callable[..., Outcome], dense_dir: Path, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[optimizer]\nlearning_rate = 1e-3\n[checkpoint]\ndir = "{tmp_path / "ck"}"\nevery_steps = 1\n')
    common = ["--model", str(dense_dir), "--data", str(data), "--groups-per-batch", "1"]
    done = run("train", str(config), *common, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all("train/grad_norm" in step for step in steps)
    again = run("train", str(config), *common, "--out", str(tmp_path / "again"), "--resume")
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "again" / "metrics.jsonl").exists()
    done = run("export", str(tmp_path / "ck"), "--model", str(dense_dir), "--out", str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    trained = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name]) for name in exported)


def test_supervised_training(run: Callable[..., Outcome], dense_dir: Path, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[optimizer]\nlearning_rate = 1e-2\n")
    done = run(
        *("sft", str(config), "--model", str(dense_dir), "--data", str(data)),
        *("--out", str(tmp_path), "--epochs", "3"),
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["train/loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[optimizer]\nlerning_rate = 1\n", "optimizer.lerning_rate"),
        ("[optimizer\n", "cannot be read"),
        ("[objective]\ndual_clip = 0.5\n", "dual_clip_bound"),
    ],
)
def test_bad_options_are_one_line(
    run: Callable[..., Outcome], tmp_path: Path, data: Path, toml: str, message: str
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(toml)
    done = run("train", str(config), "--model", str(tmp_path), "--data", str(data), "--out", str(tmp_path))
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("miles-trainer: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_model_is_one_line(run: Callable[..., Outcome], tmp_path: Path, data: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("")
    done = run("train", str(config), "--model", str(tmp_path / "no"), "--data", str(data), "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"miles-trainer: {tmp_path / 'no'} has no config.json: name a Hugging Face model folder"
    ]


def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom miles_trainer.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    for command in ("train", "sft", "export"):
        assert command in run.stdout
    assert time.monotonic() - started < 20
