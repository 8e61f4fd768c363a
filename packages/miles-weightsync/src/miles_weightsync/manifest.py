"""Weight manifest v1: what a version consists of, tensor by tensor. Its own digest is the identity of the version.

Written and read as `contracts/weight-manifest/v1` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from miles_weightsync import strict_json
from miles_weightsync.digest import xxh3
from miles_weightsync.errors import TensorError
from miles_weightsync.names import check_name
from miles_weightsync.protocols import WireTensor
from miles_weightsync.tensors import as_wire, tensor_nbytes

SCHEMA = "miles-weight-manifest/1"
_HEX = frozenset("0123456789abcdef")
_DIGEST_LENGTH = 32


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a version. `digest` is xxh3-128 over its row-major bytes, `encoding` how these are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    encoding: Literal["raw"] = "raw"

    def __post_init__(self) -> None:
        check_name(self.name)
        tensor_nbytes(self.dtype, self.shape)
        if len(self.digest) != _DIGEST_LENGTH or not _HEX.issuperset(self.digest):
            raise TensorError("manifest", f"digest {self.digest!r} of {self.name} is not 32 lower-case hex digits")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def line(self) -> bytes:
        """The record's line in the text whose SHA-256 is the manifest digest."""
        shape = ",".join(map(str, self.shape))
        return f"{self.name}\0{self.dtype}\0{shape}\0{self.digest}\n".encode()


@dataclass(frozen=True)
class Manifest:
    """The tensors of a version, sorted by name as UTF-8 bytes. `base`: the version a delta builds on.

    Raises TensorError (code `duplicate_name`) when two records share a name.
    """

    version: int
    tensors: tuple[TensorRecord, ...]
    base: int | None = None
    digest: str = field(init=False)
    """SHA-256 over the records' lines, lower-case hex."""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda record: record.name.encode()))
        repeated = [a.name for a, b in pairwise(ordered) if a.name == b.name]
        if repeated:
            raise TensorError("duplicate_name", f"tensor {repeated[0]} appears twice in a manifest", repeated)
        object.__setattr__(self, "tensors", ordered)
        object.__setattr__(self, "digest", hashlib.sha256(b"".join(r.line for r in ordered)).hexdigest())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.nbytes for record in self.tensors)

    def digests(self) -> dict[str, str]:
        """The digest of each tensor by name."""
        return {record.name: record.digest for record in self.tensors}


def record_of(name: str, tensor: WireTensor) -> TensorRecord:
    """Digest one tensor. Raises TensorError (codes `name`, `dtype`, `shape`, `size`)."""
    check_name(name)
    raw = as_wire(tensor)
    return TensorRecord(name, raw.dtype, raw.shape, xxh3(raw.data))


def manifest_of(version: int, tensors: Iterable[tuple[str, WireTensor]], base: int | None = None) -> Manifest:
    """Digest named tensors into the manifest of `version`."""
    return Manifest(version, tuple(record_of(name, tensor) for name, tensor in tensors), base)


@dataclass(frozen=True, slots=True)
class ManifestDiff:
    """What differs between two manifests, as sorted names. `meta` is dtype or shape, `bytes` only the content."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    meta: tuple[str, ...]
    bytes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True when nothing differs."""
        return not (self.missing or self.extra or self.meta or self.bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that differs in any way, sorted."""
        return tuple(sorted({*self.missing, *self.extra, *self.meta, *self.bytes}))


def diff_manifests(base: Manifest, new: Manifest) -> ManifestDiff:
    """Compare `new` with `base`: names absent from `new` are missing, names only in `new` are extra."""
    old = {record.name: record for record in base.tensors}
    now = {record.name: record for record in new.tensors}
    shared = sorted(old.keys() & now.keys())
    meta = [n for n in shared if (old[n].dtype, old[n].shape) != (now[n].dtype, now[n].shape)]
    changed = [n for n in shared if n not in meta and old[n].digest != now[n].digest]
    return ManifestDiff(
        tuple(sorted(old.keys() - now.keys())), tuple(sorted(now.keys() - old.keys())), tuple(meta), tuple(changed)
    )


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as a JSON object of the contract."""
    return {
        "schema": SCHEMA,
        "version": str(manifest.version),
        "base_version": None if manifest.base is None else str(manifest.base),
        "digest_format": "xxh3-128",
        "manifest_digest": manifest.digest,
        "tensors": [_record_to_json(record) for record in manifest.tensors],
    }


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """Read a manifest. Raises TensorError (code `manifest`) when it breaks the contract or its digest is another's."""
    if value.get("schema") != SCHEMA or value.get("digest_format") != "xxh3-128":
        raise TensorError("manifest", f"not a {SCHEMA} document with xxh3-128 digests")
    try:
        base = value["base_version"]
        records = tuple(_record_from_json(item) for item in value["tensors"])
        manifest = Manifest(_version(value["version"]), records, None if base is None else _version(base))
    except (KeyError, TypeError, AttributeError) as error:
        raise TensorError("manifest", f"a manifest field is missing or of the wrong type: {error!r}") from None
    if manifest.digest != value.get("manifest_digest"):
        raise TensorError("manifest", "the manifest's digest does not belong to its tensors: it was changed or cut")
    return manifest


def dumps_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON text."""
    return strict_json.dumps(manifest_to_json(manifest))


def loads_manifest(text: str | bytes) -> Manifest:
    """Read a manifest from JSON text. Raises TensorError (code `manifest`)."""
    try:
        value = strict_json.loads(text)
    except ValueError as error:
        raise TensorError("manifest", str(error)) from None
    if not isinstance(value, dict):
        raise TensorError("manifest", "a manifest is a JSON object")
    return manifest_from_json(value)


def _record_to_json(record: TensorRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "nbytes": record.nbytes,
        "digest": record.digest,
        "encoding": record.encoding,
    }


def _record_from_json(item: Mapping[str, Any]) -> TensorRecord:
    if item["encoding"] != "raw":
        raise TensorError("manifest", f"encoding {item['encoding']!r} of {item['name']!r} is not known: only raw is")
    shape = tuple(item["shape"])
    if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in shape):
        raise TensorError("manifest", f"shape of {item['name']!r} is not a list of integers")
    record = TensorRecord(item["name"], item["dtype"], shape, item["digest"])
    if record.nbytes != item["nbytes"]:
        raise TensorError("manifest", f"{record.name} has {record.nbytes} bytes, the manifest says {item['nbytes']}")
    return record


def _version(text: str) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdigit()):
        raise TensorError("manifest", f"version {text!r} is not decimal text")
    return int(text)
