"""What the package offers, what importing it costs, and that its README runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import miles_tito
from miles_tito import ConfigurationError, dumps, loads
from miles_tito.config import TitoConfig
from miles_tito.fetch import fetch_tokenizer
from miles_tito.view import view_trajectory


def test_everything_promised_is_there() -> None:
    assert len(set(miles_tito.__all__)) == len(miles_tito.__all__)
    for name in miles_tito.__all__:
        assert getattr(miles_tito, name) is not None


@pytest.mark.parametrize("module", ["miles_tito", "miles_tito.server", "miles_tito.conformance", "miles_tito.cli"])
def test_importing_needs_no_torch(module: str) -> None:
    heavy = "torch transformers" + ("" if "server" in module or "conformance" in module else " uvicorn")
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {heavy.split()!r}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_no_other_package_of_the_workspace_is_imported() -> None:
    foreign = re.compile(r"^\s*(from|import)\s+miles(_(?!tito)\w+)?\b", re.M)
    for path in Path(miles_tito.__file__).parent.rglob("*.py"):
        assert not foreign.search(path.read_text()), path


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["families"], ["tokenizers", "--help"]])
def test_the_command_line_helps(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "miles_tito.cli", *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip()
    if arguments == ["families"]:
        assert done.stdout.split() == ["qwen3", "smollm2", "default"]


def test_a_trajectory_is_shown_token_by_token(contract: Path) -> None:
    lines = list(view_trajectory(contract / "trajectory.safetensors"))
    assert lines[0] == "trajectory golden-0  family qwen3  status truncated"
    assert sum("── turn" in line for line in lines) == 2
    assert sum(" 1 " in line and " v" in line for line in lines[2:]) == 6
    done = subprocess.run(
        [sys.executable, "-m", "miles_tito.cli", "view", "missing"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "miles-tito: cannot read missing: No such file or directory\n")


def test_configuration_is_frozen_and_closed() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        TitoConfig.model_validate({"session": {"matchr": "strict"}})
    with pytest.raises(ValueError, match="frozen"):
        TitoConfig().tokenizer = None  # type: ignore[misc]


def test_every_option_is_described() -> None:
    for section in (TitoConfig, *(type(value) for _, value in TitoConfig() if hasattr(value, "model_fields"))):
        for name, field in section.model_fields.items():
            assert field.description or name == "tokenizer", (section, name)


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is one for qwen3"):
        fetch_tokenizer("llama9", tmp_path)


def test_the_codec_reads_what_the_contract_holds(contract: Path) -> None:
    data = (contract / "trajectory.safetensors").read_bytes()
    assert dumps(loads(data)) == data


def test_the_example_of_the_readme_runs(root: Path) -> None:
    readme = (root / "packages" / "miles-tito" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
