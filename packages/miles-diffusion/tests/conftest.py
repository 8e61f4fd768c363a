from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = Path(__file__).resolve().parents[3].parent / "shared" / "golden" / "diffusion"
    assert folder.is_dir(), f"golden vectors are expected at {folder}, beside the clone"
    return folder
