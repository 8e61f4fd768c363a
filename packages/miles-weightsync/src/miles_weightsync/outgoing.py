"""One version, gathered from the trainer and cut into buckets, before the first byte leaves.

The whole version is held as views (or copies, where the trainer gathers into fresh memory) until it is sent: the
manifest and the names are known, and checked, while every engine still serves.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_weightsync.bucket import BucketItem, plan_buckets
from miles_weightsync.config import UnitsConfig
from miles_weightsync.errors import TensorError, WeightSyncError
from miles_weightsync.frame import BucketHeader, make_table
from miles_weightsync.manifest import Manifest, manifest_of
from miles_weightsync.names import check_names, phase_of
from miles_weightsync.policy import labels_of
from miles_weightsync.protocols import Encoder, TensorSpec, WeightSource
from miles_weightsync.tensors import RawTensor, as_wire
from miles_weightsync.units import form_units

Named = tuple[str, RawTensor]


def collect(source: WeightSource, rank: int, encoder: Encoder | None = None) -> list[Named]:
    """Every tensor of the source as it will be stored, in the source's order.

    The source is consumed to its end even when encoding fails, since other trainer ranks take part in its collectives.
    """
    collected: list[Named] = []
    failure: WeightSyncError | None = None
    for unit in source.units(rank):
        if failure is None:
            try:
                collected += _encode(unit, encoder)
            except WeightSyncError as error:
                failure = error
    if failure is not None:
        raise failure
    return collected


def consume_only(source: WeightSource, rank: int) -> None:
    """Take part in the source's collectives on a rank that sends nothing: once for each `publish` or `verify`."""
    for _ in source.units(rank):
        pass


def _encode(unit: Sequence[tuple[str, object]], encoder: Encoder | None) -> list[Named]:
    if encoder is None:
        return [(name, as_wire(tensor)) for name, tensor in unit]
    return [
        (stored, as_wire(raw)) for name, tensor in unit for stored, raw in encoder.encode(name, as_wire(tensor)).items()
    ]


@dataclass(frozen=True)
class Outgoing:
    """A version ready to send: `buckets` in sending order. `names` are all gathered names, repeated ones included."""

    manifest: Manifest
    buckets: tuple[tuple[Named, ...], ...]
    names: tuple[str, ...]

    @property
    def version(self) -> int:
        """The version to install."""
        return self.manifest.version

    @property
    def labels(self) -> tuple[str, ...]:
        """A label a bucket: n0, n1, … for the non-expert phase, then x0, …"""
        return labels_of(phase_of(bucket[0][0]) for bucket in self.buckets)

    def header(self, index: int, session: str) -> BucketHeader:
        """The header of one bucket. A full install builds on nothing, so it names its own version as base."""
        table, nbytes = make_table(self.buckets[index])
        version = str(self.version)
        phase = phase_of(self.buckets[index][0][0])
        return BucketHeader(session, version, version, index, phase, "all", table, nbytes)

    def check_against(self, expected: Iterable[TensorSpec]) -> None:
        """Raise NameSetError or TensorError (codes `dtype`, `shape`) unless this is exactly what an engine expects."""
        specs = {spec.name: spec for spec in expected}
        check_names(specs, self.names)
        for record in self.manifest.tensors:
            spec = specs[record.name]
            _require_equal("dtype", record.name, record.dtype, spec.dtype)
            _require_equal("shape", record.name, record.shape, tuple(spec.shape))


def _require_equal(what: str, name: str, sent: object, expected: object) -> None:
    if sent != expected:
        raise TensorError(what, f"{name}: the trainer sends {what} {sent}, the engine stores {expected}", [name])


def new_session(version: int) -> str:
    """A name no other session has."""
    return f"v{version}-{uuid.uuid4().hex}"


def plan_outgoing(version: int, tensors: Sequence[Named], *, bucket_bytes: int, units: UnitsConfig) -> Outgoing:
    """Digest and cut a version. Of repeated names one is taken; `check_against` refuses them before anything is sent.

    Raises UnitError, TensorError.
    """
    unique = list(dict(reversed(tensors)).items())[::-1]
    names = [name for name, _ in unique]
    unit_of = {i: str(number) for number, unit in enumerate(_units(names, units)) for i in unit}
    items = [BucketItem(name, tensor.nbytes, unit_of[i]) for i, (name, tensor) in enumerate(unique)]
    plan = plan_buckets(items, bucket_bytes, order="canonical")
    buckets = tuple(tuple(unique[i] for i in bucket) for bucket in plan)
    return Outgoing(manifest_of(version, unique), buckets, tuple(name for name, _ in tensors))


def _units(names: Sequence[str], units: UnitsConfig) -> list[list[int]]:
    return form_units(names, units.rules, units.companions)
