"""Tiny models, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles_rollout.local.testing import tiny_qwen3, tiny_qwen3_moe

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a byte tokenizer."""
    return tiny_qwen3(tmp_path_factory.mktemp("dense"), tokenizer=True)


@pytest.fixture(scope="session")
def dense_folder_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return tiny_qwen3(tmp_path_factory.mktemp("dense-next"), seed=1)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE: three layers, the middle one dense."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe"), tokenizer=True)


@pytest.fixture(scope="session")
def moe_folder_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe-next"), seed=1)


@pytest.fixture(params=["dense_folder", "moe_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Each family in turn."""
    found: Path = request.getfixturevalue(request.param)
    return found
