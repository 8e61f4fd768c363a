"""Fixtures of the integration tests: one toy for the session, and small runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from miles.layers import Setting, from_file, resolve
from miles.run import run_training
from miles.toy import ToyRecipe, toy_folder
from miles.ui import Silent

TINY = Path(__file__).parents[1] / "src" / "miles" / "recipes" / "tiny.toml"


@pytest.fixture(scope="session")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the pre-trained toy."""
    cache = tmp_path_factory.mktemp("cache")
    toy_folder(ToyRecipe(), cache)
    return cache


@pytest.fixture(scope="session")
def toy(toy_cache: Path) -> Path:
    """The toy's Hugging Face folder."""
    return toy_folder(ToyRecipe(), toy_cache)


Settings = Mapping[str, Any]
RunTiny = Callable[..., Path]


@pytest.fixture
def run_tiny(toy: Path, tmp_path: Path) -> RunTiny:
    """Run the tiny recipe on the toy with some settings changed; returns the run folder."""

    def run(name: str = "run", /, **settings: Any) -> Path:
        folder = tmp_path / name
        changes = [Setting(tuple(key.split("__")), value, "test") for key, value in settings.items()]
        model = Setting(("model", "path"), str(toy), "test")
        resolved = resolve([*from_file(TINY), model, *changes])
        asyncio.run(run_training(resolved, folder, Silent()))
        return folder

    return run
