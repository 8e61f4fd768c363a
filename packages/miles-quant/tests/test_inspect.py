from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_quant import CheckpointFolderError, Fp8BlockRecipe
from miles_quant.inspection import inspect_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16),
        "model.layers.0.mlp.gate.weight": torch.ones(2, 2),
        "model.norm.weight": torch.zeros(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_quant.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_each_tensor_is_reported_with_its_verdict(checkpoint: Path):
    reports = {report.name: report for report in inspect_folder(checkpoint, Fp8BlockRecipe())}
    projection = reports["model.layers.0.mlp.up_proj.weight"]
    assert (projection.dtype, projection.shape, projection.max_abs, projection.kept) == ("bfloat16", (1, 2), 2.5, None)
    assert reports["model.layers.0.mlp.gate.weight"].kept == "segment gate"


def test_the_command_prints_a_line_a_tensor_and_a_total(checkpoint: Path):
    done = run("inspect", str(checkpoint))
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.layers.0.mlp.up_proj.weight  bfloat16  1x2  max 2.5  quantise" in done.stdout
    assert done.stdout.splitlines()[-1] == "3 tensors, 1 would be quantised to FP8 blocks"


def test_low_precision_tensors_are_not_quantised_again(tmp_path: Path):
    save_file({"a.up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    (report,) = inspect_folder(tmp_path, Fp8BlockRecipe())
    assert report.kept == "already low precision"


def test_a_missing_folder_is_one_message(tmp_path: Path):
    done = run("inspect", str(tmp_path / "absent"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not a folder" in done.stderr


def test_a_folder_without_weights_and_a_broken_file_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointFolderError, match="holds no"):
        list(inspect_folder(tmp_path, Fp8BlockRecipe()))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointFolderError, match="not a readable safetensors file"):
        list(inspect_folder(tmp_path, Fp8BlockRecipe()))


def test_help_and_import_do_not_load_torch():
    program = (
        "import sys, miles_quant\n"
        "from miles_quant.cli import app\n"
        "app(['--help'], result_action='return_value')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout
