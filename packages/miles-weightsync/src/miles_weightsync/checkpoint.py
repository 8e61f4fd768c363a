"""Checkpoint folders of safetensors files, read without torch: headers first, bytes as views of the mapped files."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_weightsync import strict_json
from miles_weightsync.errors import CheckpointError
from miles_weightsync.manifest import Manifest, manifest_of
from miles_weightsync.tensors import RawTensor

_MAX_HEADER_NBYTES = 100 * 1024 * 1024
_PREFIX_NBYTES = 8
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a file; `start` and `end` count bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


def list_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of a Hugging Face folder, in the order of its files. Raises CheckpointError."""
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder):
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise CheckpointError(f"{tensor.name} is in {tensors[tensor.name].file.name} and in {file.name}")
            tensors[tensor.name] = tensor
    return list(tensors.values())


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: name a Hugging Face model folder")
    index = folder / _INDEX
    names = _indexed(index) if index.is_file() else {path.name for path in folder.glob("*.safetensors")}
    if not names:
        raise CheckpointError(f"{folder} holds no safetensors files")
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names")
    return [folder / name for name in sorted(names)]


def _indexed(index: Path) -> set[str]:
    try:
        names = set(strict_json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of a checkpoint: {error!r}") from None
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong:
        raise CheckpointError(f"{index} names files outside its folder: {wrong[0]!r}")
    return names


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file. Raises CheckpointError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_PREFIX_NBYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX_NBYTES else -1
        if not 0 <= length <= min(_MAX_HEADER_NBYTES, size - _PREFIX_NBYTES):
            raise CheckpointError(f"{file} is no safetensors file: its header does not fit in it")
        text = stream.read(length)
    try:
        header = strict_json.loads(text)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return [_stored(file, name, entry, _PREFIX_NBYTES + length, size) for name, entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a damaged header: {error}") from None


def _stored(file: Path, name: str, entry: Mapping[str, Any], base: int, size: int) -> StoredTensor:
    start, end = (base + offset for offset in entry["data_offsets"])
    if not base <= start <= end <= size:
        raise ValueError(f"{name} lies outside the file")
    return StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, start, end)


def map_tensors(tensors: list[StoredTensor]) -> Iterator[tuple[str, RawTensor]]:
    """Named views of the tensors' bytes; a file stays mapped while views of it live. Raises TensorError."""
    maps: dict[Path, memoryview] = {}
    for tensor in tensors:
        if tensor.file not in maps:
            with tensor.file.open("rb") as stream:
                maps[tensor.file] = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        yield tensor.name, RawTensor(tensor.dtype, tensor.shape, maps[tensor.file][tensor.start : tensor.end])


def checkpoint_manifest(folder: Path, version: int = 0) -> Manifest:
    """The manifest of a folder's tensors. Raises CheckpointError, TensorError."""
    return manifest_of(version, map_tensors(list_tensors(folder)))
