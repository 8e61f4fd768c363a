"""A Hugging Face folder of safetensors files: names, dtypes and shapes first, bytes when asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from miles_rollout.local.errors import EngineSetupError
from miles_rollout.protocols import TensorSpec


class Checkpoint:
    """Every tensor of a folder. Opening reads and checks all headers against the sizes of the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {path: _open(path) for path in _tensor_files(folder)}
        self._file_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        self.specs = {spec.name: spec for spec in self._read_specs()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, in the dtype of the file."""
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def _read_specs(self) -> Iterator[TensorSpec]:
        for name, path in self._file_of.items():
            header = self._files[path].get_slice(name)
            yield TensorSpec(name, str(header.get_dtype()), tuple(header.get_shape()))


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineSetupError(
            f"{index!s:.200} is no index of safetensors files: {type(error).__name__}: {error!s:.200}",
            code="checkpoint_unreadable",
        ) from error
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise EngineSetupError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json: give a Hugging Face folder with "
        "safetensors weights",
        code="checkpoint_missing",
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise EngineSetupError(
            f"{path} cannot be read as safetensors: {error}", code="checkpoint_unreadable"
        ) from error
