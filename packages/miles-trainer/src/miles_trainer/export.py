"""The trainer's weights as named full tensors: the bytes that engines and Hugging Face folders get.

Names are those of the Hugging Face checkpoint: fused experts are cut into one tensor an expert and projection, and a
tied output embedding appears once, as the input embedding.

Shapes: E experts, I expert width, C hidden size.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles_trainer.backends.fsdp2 import Fsdp2Backend, full
from miles_trainer.distributed import RankGroup
from miles_trainer.errors import ExportError

ExportDtype = Literal["BF16", "F32"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F32": torch.float32}
COMPANION_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor as bytes: safetensors dtype name, shape, row-major little-endian data. It owns its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def export_tensor(tensor: torch.Tensor, dtype: ExportDtype) -> ExportTensor:
    """Cast (round to nearest even) and copy."""
    cast_tensor = tensor.detach().to(TORCH_DTYPES[dtype], copy=True).contiguous()
    data = memoryview(cast("Any", cast_tensor.reshape(-1).view(torch.uint8).numpy()))
    return ExportTensor(dtype, tuple(tensor.shape), data)


def hf_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names of a parameter: fused experts [E, 2I, C] and [E, C, I] one by one, anything else as it is."""
    fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if fused is None:
        yield name, tensor
        return
    prefix, kind = fused.groups()
    for expert, matrix in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", matrix
            continue
        gate, up = matrix.chunk(2)
        yield f"{prefix}.{expert}.gate_proj.weight", gate
        yield f"{prefix}.{expert}.up_proj.weight", up


class HfWeights:
    """The weights at the time of iteration. Satisfies miles-weightsync's `WeightSource`."""

    def __init__(
        self,
        backend: Fsdp2Backend,
        group: RankGroup,
        model_dir: Path,
        *,
        dtype: ExportDtype = "BF16",
        dtypes: Mapping[str, ExportDtype] | None = None,
    ) -> None:
        """Raises ExportError when the names would not be those of `model_dir`, or `dtypes` names an unknown tensor."""
        self._backend, self._group, self._model_dir = backend, group, model_dir
        self._dtype, self._dtypes = dtype, dict(dtypes or {})
        self.names = tuple(name for key, p in backend.parameters.items() for name, _ in hf_tensors(key, _shape_only(p)))
        _check_names(self.names, self._dtypes, model_dir)

    def units(self, rank: int | None = None) -> Iterator[list[tuple[str, ExportTensor]]]:
        """Lists of (Hugging Face name, tensor) gathered together, one a decoder layer, in the model's order.

        Collective: every rank iterates to the end. Rank 0 is the source; the others get as many empty lists.
        """
        source = (self._group.rank if rank is None else rank) == 0
        for keys in _layer_groups(self._backend.parameters):
            unit: list[tuple[str, ExportTensor]] = []
            for key in keys:
                whole = full(self._backend.parameters[key].detach())
                if source:
                    unit += [(n, export_tensor(t, self._dtypes.get(n, self._dtype))) for n, t in hf_tensors(key, whole)]
            yield unit

    def save_hf(self, path: Path, *, shard_bytes: int = 4 << 30) -> None:
        """Write a folder that plain transformers loads; tensor bytes equal those of `units`. Collective.

        Raises ExportError on the source rank when writing failed, RankError on the others.
        """
        folder = Path(path)
        error: ExportError | None = None
        writer = _HfWriter(folder, shard_bytes) if self._group.rank == 0 else None
        for unit in self.units():
            if writer is not None and error is None:
                error = _attempt(partial(writer.add, unit), folder)
        if writer is not None and error is None:
            error = _attempt(partial(writer.finish, self._backend.module, self._model_dir, self._dtype), folder)
        self._group.agree(error, f"write {folder}")


def _attempt(write: Callable[[], None], folder: Path) -> ExportError | None:
    """Run one write; its failure is returned, for the ranks to agree on once the collectives are through."""
    try:
        write()
    except (OSError, SafetensorError) as error:
        return ExportError(f"{folder} could not be written: {error}")
    return None


def _shape_only(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, device="meta")


def _layer_groups(parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Parameter names in the model's order, those of one decoder layer together, each other one alone."""
    groups: dict[str, list[str]] = {}
    for name in parameters:
        layer = re.match(r".*\blayers\.\d+\.", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())


def checkpoint_names(model_dir: Path) -> set[str]:
    """Tensor names of a folder's safetensors files; empty when it has none."""
    names: set[str] = set()
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def _check_names(names: Sequence[str], dtypes: Mapping[str, str], model_dir: Path) -> None:
    unknown = sorted(set(dtypes) - set(names))
    if unknown:
        raise ExportError(f"dtypes names {len(unknown)} tensors the model does not have, first {unknown[0]}")
    stored = checkpoint_names(model_dir)
    missing = sorted(stored - set(names) - {"lm_head.weight"})
    extra = sorted(set(names) - stored) if stored else []
    if missing or extra:
        raise ExportError(
            f"exported names differ from {model_dir}: {len(missing)} missing (first {missing[:1]}), {len(extra)} extra "
            f"(first {extra[:1]}); this family's checkpoint names are not known to this release"
        )


class _HfWriter:
    """Writes shards as they fill, then the index and the companions of the weights."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._open: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = self._total_bytes = 0

    def add(self, unit: Sequence[tuple[str, ExportTensor]]) -> None:
        for name, tensor in unit:
            flat = (
                torch.frombuffer(tensor.data, dtype=torch.uint8)
                if len(tensor.data)
                else torch.zeros(0, dtype=torch.uint8)
            )
            self._open[name] = flat.view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
            self._bytes += len(tensor.data)
        if self._bytes >= self._shard_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(self._open, self._part(len(self._shards)), metadata={"format": "pt"})
            self._shards.append(list(self._open))
            self._total_bytes += self._bytes
        self._open, self._bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f".part-{index}.safetensors"

    def finish(self, module: torch.nn.Module, model_dir: Path, dtype: ExportDtype) -> None:
        self._flush()
        count = len(self._shards)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )
        for index, name in enumerate(names):
            self._part(index).replace(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            index_json = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1, sort_keys=True))
        _write_companions(module, model_dir, self._folder, dtype)


def _write_companions(module: torch.nn.Module, model_dir: Path, folder: Path, dtype: ExportDtype) -> None:
    """Tokenizer and other small files as they were; config.json with the number format of the export."""
    for pattern in COMPANION_PATTERNS:
        for file in model_dir.glob(pattern):
            if not file.name.endswith(".index.json") and folder.resolve() != model_dir.resolve():
                shutil.copyfile(file, folder / file.name)
    settings: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    tied = cast("Any", module).config.tie_word_embeddings
    settings["tie_word_embeddings"] = bool(tied)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
