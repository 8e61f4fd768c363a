"""What is in a checkpoint folder, and what a recipe would do with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from miles_quant.errors import CheckpointFolderError
from miles_quant.recipes import Fp8BlockRecipe


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of a checkpoint.

    Attributes:
        name: name in the checkpoint.
        dtype: torch dtype name without its prefix.
        shape: shape.
        max_abs: largest magnitude; NaN when the tensor holds NaN; 0 when it is empty.
        kept: why the recipe leaves it alone; None when it would be quantised.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float
    kept: str | None


def inspect_folder(folder: Path, recipe: Fp8BlockRecipe) -> Iterator[TensorReport]:
    """Report each tensor of the safetensors files of `folder`, one tensor in memory at a time.

    Raises:
        CheckpointFolderError: no such folder, no safetensors file in it, or one that cannot be read.
    """
    for file in _safetensors_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    yield _report(name, tensors.get_tensor(name), recipe)
        except SafetensorError as error:
            raise CheckpointFolderError(
                f"{file} is not a readable safetensors file ({error}): fetch it again"
            ) from error


def _safetensors_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointFolderError(f"{folder} is not a folder: give the folder of a Hugging Face checkpoint")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointFolderError(f"{folder} holds no *.safetensors file: other checkpoint formats are not read")
    return files


def _report(name: str, tensor: torch.Tensor, recipe: Fp8BlockRecipe) -> TensorReport:
    shape = tuple(tensor.shape)
    reason = recipe.reason_to_keep(name, shape)
    if reason is None and tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reason = "already low precision"
    return TensorReport(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        max_abs=float(tensor.to(torch.float64).abs().max()) if tensor.numel() else 0.0,
        kept=reason,
    )
