from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from miles_trainer.testing import write_tiny_qwen3, write_tiny_qwen3_moe

torch.set_num_threads(1)
logging.disable_progress_bar()

GOLDEN = Path(__file__).resolve().parents[3].parent / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    if not GOLDEN.is_dir():
        pytest.fail(f"golden vectors are not at {GOLDEN}: put shared/ beside the clone")
    return GOLDEN


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("untied"), tied=False)
