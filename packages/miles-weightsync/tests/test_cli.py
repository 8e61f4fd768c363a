"""The command, as it is typed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "miles_weightsync.cli"]


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _write(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first = {
        "model.embed_tokens.weight": ("BF16", [2, 4], bytes(range(16))),
        "model.layers.0.mlp.down_proj.weight": ("F8_E4M3", [1, 4], bytes.fromhex("38b87e00")),
    }
    second = {"model.layers.0.mlp.down_proj.weight_scale_inv": ("F32", [1, 1], bytes.fromhex("0000803e"))}
    _write(tmp_path / "a", first, "model-00001-of-00002.safetensors")
    _write(tmp_path / "a", second, "model-00002-of-00002.safetensors")
    return tmp_path / "a"


def test_inspect_prints_the_identity(folder: Path) -> None:
    done = _run("inspect", folder)
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert last == "3 tensors, 24 bytes, manifest ca8925174427790c8a3fafaedaad3ef1fe292065ec12584fa70e6fdf20d41a39"
    manifest = json.loads(_run("inspect", folder, "--json").stdout)
    assert manifest["schema"] == "miles-weight-manifest/1"


def test_verify_names_what_differs(folder: Path, tmp_path: Path) -> None:
    assert _run("verify", folder, folder).returncode == 0
    other = _write(tmp_path / "b", {"model.embed_tokens.weight": ("BF16", [2, 4], bytes(range(1, 17)))})
    done = _run("verify", folder, other)
    assert done.returncode == 1
    assert "bytes    model.embed_tokens.weight" in done.stdout
    assert "missing  model.layers.0.mlp.down_proj.weight" in done.stdout


def test_plan_keeps_a_weight_and_its_scale_together(folder: Path) -> None:
    done = _run("plan", folder, "--bucket-bytes", 1)
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["1", "2"]


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_bad_input_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    for name in ("nowhere", "short", "index", "."):
        done = _run(command, tmp_path / name)
        assert done.returncode == 2, name
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("miles-weightsync: ")


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['x', '--help']\nfrom miles_weightsync.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    for command in ("inspect", "verify", "plan"):
        assert command in done.stdout
