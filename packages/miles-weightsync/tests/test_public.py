"""The public surface, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import miles_weightsync
from miles_weightsync import RawTensor, WeightPort, WeightSyncConfig, WeightSyncError, WireTensor, errors
from miles_weightsync.testing import MemoryPort

PACKAGE = Path(miles_weightsync.__file__).parent
README = Path(__file__).parents[1] / "README.md"


def test_all_names_exist() -> None:
    for name in miles_weightsync.__all__:
        assert getattr(miles_weightsync, name) is not None
    assert sorted(miles_weightsync.__all__) == miles_weightsync.__all__


def test_importing_costs_no_torch() -> None:
    script = (
        "import sys, miles_weightsync, miles_weightsync.testing, miles_weightsync.conformance\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_nothing_can_be_unpickled_or_evaluated() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve|dill|cloudpickle)", text, re.MULTILINE), path
        assert not re.search(r"(?<![\w.])(eval|exec)\(", text), path
        assert "broadcast_object" not in text, path


def test_errors_have_one_root_and_a_standard_type() -> None:
    defined = [kind for kind in vars(errors).values() if getattr(kind, "__module__", "") == errors.__name__]
    kinds = [kind for kind in defined if isinstance(kind, type) and kind is not WeightSyncError]
    assert len(kinds) > 15
    for kind in kinds:
        assert issubclass(kind, WeightSyncError)
        assert len(kind.__mro__) > 4, f"{kind.__name__} inherits a standard type too"


def test_fakes_satisfy_the_protocols() -> None:
    tensor = RawTensor("U8", (1,), memoryview(b"x"))
    assert isinstance(tensor, WireTensor)
    assert isinstance(MemoryPort({"a": tensor}), WeightPort)


@pytest.mark.parametrize(
    "wrong",
    [{"transport": "nccl"}, {"bucket_bytes": 0}, {"bucket_size": 1}, {"rpc": {"timeout": 3}}, {"verify": "yes"}],
)
def test_a_misspelt_option_fails(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WeightSyncConfig(**wrong)


def test_the_configuration_is_frozen_and_described() -> None:
    config = WeightSyncConfig()
    assert (config.transport, config.bucket_bytes, config.verify) == ("shm", 512 * 1024 * 1024, "full")
    with pytest.raises(ValidationError):
        config.transport = "tcp"  # type: ignore[misc]
    for name, field in WeightSyncConfig.model_fields.items():
        assert field.description, name


def test_the_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-W", "error", "-c", block], check=True, timeout=60)
