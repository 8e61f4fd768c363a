"""The index of a version directory, checked before any file it names is opened."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_weightsync import strict_json
from miles_weightsync.delta.chain import require_base
from miles_weightsync.delta.codec import ENCODINGS
from miles_weightsync.digest import DIGEST_FORMATS
from miles_weightsync.errors import DeltaError, TensorError
from miles_weightsync.names import check_name
from miles_weightsync.tensors import Spec

_FILE = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_VERSION = re.compile(r"[0-9]{6}")


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A name in a version directory; `kind` is file for plain files."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """What a version directory holds; `files` are sorted."""

    kind: Literal["full", "delta"]
    version: int
    base_version: int | None
    files: tuple[str, ...]


def validate_index(
    directory: str,
    index_text: str,
    commit_text: str | None,
    entries: Sequence[DirectoryEntry],
    applied: int,
) -> VersionIndex:
    """Check a version directory by its index, its COMMIT text and the names in it.

    `applied` is the version a delta must build on. Raises DeltaError or TensorError; the checks run in the order of the
    contract: commit marker, JSON, metadata, tensor names, file names, files, lineage.
    """
    _check_commit(index_text, commit_text)
    metadata, weight_map = _parse(index_text)
    version, base = _check_metadata(directory, metadata)
    for name in weight_map:
        check_name(name)
    files = _check_files(weight_map)
    _check_entries(files, entries)
    if base is None:
        return VersionIndex("full", version, None, files)
    if base >= version:
        raise DeltaError("lineage", f"version {version} cannot build on {base}")
    require_base(base, applied)
    return VersionIndex("delta", version, base, files)


def _check_commit(index_text: str, commit_text: str | None) -> None:
    wanted = hashlib.sha256(index_text.encode()).hexdigest()
    if commit_text is None or commit_text.strip() != wanted:
        raise DeltaError("not_committed", "the directory has no COMMIT of this index: it is not published (yet)")


def _parse(index_text: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    try:
        value = strict_json.loads(index_text)
    except strict_json.RepeatedKeyError as error:
        raise TensorError("duplicate_name", f"the index: {error}") from None
    except strict_json.JsonSyntaxError as error:
        raise DeltaError("format", f"the index: {error}") from None
    metadata = value.get("metadata") if isinstance(value, dict) else None
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise DeltaError("format", "the index needs the objects metadata and weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise DeltaError("format", "a file name in weight_map is no text")
    return metadata, weight_map


def _check_metadata(directory: str, metadata: Mapping[str, Any]) -> tuple[int, int | None]:
    version = _version(metadata, "version")
    if directory != f"weight_v{metadata['version']}":
        raise DeltaError("format", f"directory {directory} holds version {metadata['version']}")
    if "delta_encoding" not in metadata:
        return version, None
    _require_known(metadata, "delta_encoding", ENCODINGS)
    _require_known(metadata, "compression_format", ("zstd",))
    _require_known(metadata, "checksum_format", DIGEST_FORMATS)
    return version, _version(metadata, "base_version")


def _version(metadata: Mapping[str, Any], key: str) -> int:
    text = metadata.get(key)
    if not isinstance(text, str) or not _VERSION.fullmatch(text):
        raise DeltaError("format", f"{key} {text!r} is not six digits")
    return int(text)


def _require_known(metadata: Mapping[str, Any], key: str, known: Sequence[str]) -> None:
    if metadata.get(key) not in known:
        raise DeltaError("format", f"{key} {metadata.get(key)!r} is none of {' '.join(known)}")


def _check_files(weight_map: Mapping[str, str]) -> tuple[str, ...]:
    totals, numbers = set(), {}
    for file in weight_map.values():
        match = _FILE.fullmatch(file)
        if match is None:
            raise DeltaError("path", f"{file!r:.80} is not a file name model-ddddd-of-ddddd.safetensors")
        numbers[int(match[1])] = file
        totals.add(int(match[2]))
    if not numbers:
        return ()
    total = totals.pop()
    if totals or not all(1 <= number <= total for number in numbers):
        raise DeltaError("format", "the file numbers of the index do not agree on how many files there are")
    return tuple(f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1))


def _check_entries(files: Sequence[str], entries: Sequence[DirectoryEntry]) -> None:
    kinds = {entry.name: entry.kind for entry in entries}
    for file in files:
        if file not in kinds:
            raise DeltaError("missing_file", f"{file} is named by the index and not there")
        if kinds[file] != "file":
            raise DeltaError("link", f"{file} is a {kinds[file]}, not a plain file")


def check_base(base: Sequence[Spec], new: Sequence[Spec]) -> None:
    """Raise DeltaError (code `base_mismatch`) naming each tensor that the base lacks or holds differently."""
    known = {spec.name: spec for spec in base}
    names = sorted(spec.name for spec in new if known.get(spec.name) != spec)
    if names:
        raise DeltaError("base_mismatch", f"not in the base with this dtype and shape: {', '.join(names)}", names)
