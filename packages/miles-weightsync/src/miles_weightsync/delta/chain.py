"""Chains: deltas applied one after the other, each on exactly the version it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_weightsync.delta.codec import apply_delta
from miles_weightsync.errors import DeltaError


@dataclass(frozen=True, slots=True)
class Delta:
    """One tensor's step from `base_version` to `version`; `digest` is that of the complete new bytes."""

    version: int
    base_version: int
    encoding: str
    stream: bytes
    digest: str
    checksum: str = "xxh3-128"


def apply_chain(base: bytes, applied: int, deltas: Sequence[Delta]) -> tuple[bytes, int]:
    """The bytes and the version after all deltas; each digest is checked.

    Raises DeltaError (code `lineage`) when a delta's base is not the applied version.
    """
    current = base
    for delta in deltas:
        require_base(delta.base_version, applied)
        current = apply_delta(current, delta.stream, delta.encoding, delta.digest, delta.checksum)
        applied = delta.version
    return current, applied


def require_base(base_version: int, applied: int) -> None:
    """Raise DeltaError (code `lineage`) unless a delta's base is the applied version."""
    if base_version != applied:
        raise DeltaError("lineage", f"the delta builds on version {base_version} and {applied} is applied")


def changed_names(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    """Sorted names whose bytes differ: the tensors of a delta."""
    return sorted(name for name, data in new.items() if old[name] != data)
