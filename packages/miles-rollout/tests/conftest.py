"""Paths of the repository's contracts and of the golden vectors beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def contracts() -> Path:
    return ROOT / "contracts"


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = ROOT.parent / "shared" / "golden" / "rollout"
    assert folder.is_dir(), f"the golden vectors belong in {folder}"
    return folder
