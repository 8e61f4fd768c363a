"""What an update did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from miles_weightsync.errors import WeightIdentityError, WeightSyncError
from miles_weightsync.manifest import Manifest
from miles_weightsync.policy import FinalState


@dataclass(frozen=True, slots=True)
class UpdateEvent:
    """A step of an update as it starts (`lock`, `pause`, `bucket n0`, `commit`, …), `seconds` after it began."""

    version: int
    action: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """One engine after an update. `version` None: not known to be whole. `error`, `phase`: why it left it."""

    engine_id: str
    address: str
    state: FinalState
    version: int | None
    phase: str = ""
    error: WeightSyncError | None = field(default=None, compare=False)

    @property
    def in_router(self) -> bool:
        """Whether it may receive requests."""
        return self.state == "serving"


@dataclass(frozen=True)
class UpdateReport:
    """An update that reached at least one engine. `digest` is the identity of the version."""

    version: int
    manifest: Manifest
    outcome: Literal["ok", "partial", "failed"]
    engines: tuple[EngineOutcome, ...]
    seconds: Mapping[str, float]
    """Wall-clock seconds: gather, plan, lock, preflight, pause, flush, begin, bucket, commit, resume, unlock, total."""
    wire_bytes: int
    """Payload bytes that left the publisher; a broadcast counts once."""
    buckets: int
    actions: tuple[str, ...]
    tensors_verified: int = 0
    """Tensors that engines of this version read back and found equal to the manifest, summed over engines."""

    @property
    def digest(self) -> str:
        """The manifest digest of the version."""
        return self.manifest.digest

    @property
    def engines_ok(self) -> int:
        """Engines that serve the version."""
        return sum(engine.in_router for engine in self.engines)

    @property
    def engines_poisoned(self) -> int:
        """Engines that need a full install before they serve."""
        return sum(engine.state == "poisoned" for engine in self.engines)

    @property
    def identity_errors(self) -> tuple[WeightIdentityError, ...]:
        """The engines whose stored bytes were not those sent; they are poisoned."""
        return tuple(e.error for e in self.engines if isinstance(e.error, WeightIdentityError))


@dataclass(frozen=True)
class VerifyReport:
    """Engines whose stored tensors were found equal to the trainer's, without an update."""

    version: int
    manifest: Manifest
    engines: tuple[str, ...]
    seconds: float

    @property
    def digest(self) -> str:
        """The manifest digest of the version."""
        return self.manifest.digest
