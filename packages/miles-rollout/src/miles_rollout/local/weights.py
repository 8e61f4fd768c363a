"""The engine's weights as a `WeightPort`: sessions, loads and commits, carried out on the engine thread.

serving ─pause→ paused ─begin→ session ─load…→ loaded ─commit→ paused ─resume→ serving
Anything after the first load that is not a commit ends in poison; only a commit of all tensors cures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from miles_rollout.local.checkpoint import Checkpoint
from miles_rollout.local.core import EngineCore
from miles_rollout.local.errors import WeightStateError
from miles_rollout.protocols import PauseMode, PortDescription, WireTensor

T = TypeVar("T")
RunOnEngine = Callable[[Callable[[], T]], T]


@dataclass(slots=True)
class WeightSession:
    """An open update: what it leads to and which tensors have arrived."""

    name: str
    target_version: int
    loaded: set[str] = field(default_factory=set)


class EnginePort:
    """`miles_rollout.protocols.WeightPort` over one engine. Thread-safe."""

    def __init__(self, core: EngineCore, epoch: int, run: RunOnEngine[object]) -> None:
        self._core = core
        self._epoch = epoch
        self._run = run
        self._session: WeightSession | None = None
        self._digest: str | None = None

    @property
    def digest(self) -> str | None:
        """Manifest digest of the last commit; None for the boot checkpoint."""
        return self._digest

    @property
    def uncommitted(self) -> bool:
        """True while loaded tensors wait for a commit."""
        return self._session is not None and bool(self._session.loaded)

    def describe(self) -> PortDescription:
        return self._call(self._describe)

    def pause(self, mode: PauseMode) -> None:
        self._call(lambda: self._core.pause(mode))

    def flush(self) -> None:
        self._call(self._core.flush)

    def begin(self, session: str, target_version: int) -> None:
        """Open a session. Raises `WeightStateError` unless the engine is paused, none is open and versions rise."""
        self._call(lambda: self._begin(session, target_version))

    def load(self, tensors: Mapping[str, WireTensor]) -> None:
        """Store tensors. Raises `WeightTensorError` (nothing stored) or `WeightStateError` (no session)."""
        self._call(lambda: self._load(tensors))

    def read(self, name: str) -> memoryview:
        """Return the stored bytes of `name`, read-only, without a copy: valid until the next load."""
        return self._call(lambda: self._core.model.weights.read(name))

    def load_bucket(self, session: str, tensors: Mapping[str, WireTensor]) -> None:
        """Store tensors in session `session`, opening it (towards the next version) when it is not open yet."""
        self._call(lambda: self._load_bucket(session, tensors))

    def commit(self, version: int, digest: str) -> None:
        """Take the loaded weights as `version`. A poisoned engine needs all tensors in the session."""
        self._call(lambda: self._commit(version, digest))

    def abort(self) -> None:
        """Close a session that has loaded nothing. Raises `WeightStateError` afterwards: poison instead."""
        self._call(self._abort)

    def resume(self) -> None:
        self._call(self._resume)

    def poison(self, reason: str) -> None:
        self._call(lambda: self._poison(reason))

    def install_checkpoint(self, checkpoint: Checkpoint, version: int | None, digest: str = "") -> int:
        """Check a whole folder, then install it as `version` (default: the next one) between two steps.

        Running requests are retracted and go on under the new weights. Returns the version.
        """
        return self._call(lambda: self._install(checkpoint, version, digest))

    def relabel(self, version: int) -> None:
        """Name the weights `version`: commits a loaded session, or raises the label of unchanged weights."""
        self._call(lambda: self._relabel(version))

    def _call(self, command: Callable[[], T]) -> T:
        return self._run(command)  # type: ignore[return-value]

    def _describe(self) -> PortDescription:
        core = self._core
        return PortDescription(
            engine_id=core.engine_id,
            epoch=self._epoch,
            version=None if core.poison_reason is not None else core.version,
            expected_tensors=tuple(core.model.weights.specs.values()),
            quant_config=core.model.quant_config,
        )

    def _begin(self, session: str, target_version: int) -> None:
        if self._core.paused is None:
            raise WeightStateError("an update needs a paused engine: pause it first", code="not_paused")
        if self._session is not None and self._session.loaded:
            raise WeightStateError(
                f"session {self._session.name!r} has loaded {len(self._session.loaded)} tensors and is still open: "
                "commit or poison it first",
                code="session_open",
            )
        self._check_rises(target_version)
        self._session = WeightSession(session, target_version)

    def _check_rises(self, version: int) -> None:
        if version <= self._core.version and self._core.poison_reason is None:
            raise WeightStateError(
                f"version {version} does not follow {self._core.version}: versions only rise", code="version_not_rising"
            )

    def _require_session(self) -> WeightSession:
        if self._session is None:
            raise WeightStateError("no update session is open: call begin first", code="no_session")
        return self._session

    def _load(self, tensors: Mapping[str, WireTensor]) -> None:
        session = self._require_session()
        self._core.model.weights.load(tensors)
        session.loaded.update(tensors)

    def _load_bucket(self, session: str, tensors: Mapping[str, WireTensor]) -> None:
        if self._session is None or self._session.name != session:
            self._begin(session, self._core.version + 1)
        self._load(tensors)

    def _commit(self, version: int, digest: str) -> None:
        session = self._require_session()
        if version != session.target_version:
            raise WeightStateError(
                f"commit names version {version}; session {session.name!r} leads to {session.target_version}",
                code="version_mismatch",
            )
        self._check_complete(session)
        self._finish(version, digest)

    def _check_complete(self, session: WeightSession) -> None:
        missing = set(self._core.model.weights.specs) - session.loaded
        if self._core.poison_reason is not None and missing:
            raise WeightStateError(
                f"the engine is poisoned ({self._core.poison_reason}) and {len(missing)} tensors did not arrive, "
                f"{min(missing)} among them: install a whole set",
                code="incomplete_install",
            )

    def _finish(self, version: int, digest: str) -> None:
        self._session = None
        self._digest = digest
        self._core.start_version(version)
        self._core.cure()

    def _abort(self) -> None:
        if self.uncommitted:
            raise WeightStateError("tensors were loaded: this session can only be committed or poisoned", code="loaded")
        self._session = None

    def _resume(self) -> None:
        if self.uncommitted:
            raise WeightStateError(
                "loaded weights are not committed: no request may see them", code="weights_uncommitted"
            )
        self._core.resume()

    def _poison(self, reason: str) -> None:
        self._session = None
        self._core.poison(reason)

    def _install(self, checkpoint: Checkpoint, version: int | None, digest: str) -> int:
        if self.uncommitted:
            raise WeightStateError("another update has loaded tensors: commit or poison it first", code="session_open")
        target = self._core.version + 1 if version is None else version
        self._check_rises(target)
        weights = self._core.model.weights
        weights.check_checkpoint(checkpoint)
        was_paused = self._core.paused
        if was_paused is None:
            self._core.pause("retract")
        weights.install_checkpoint(checkpoint)
        self._finish(target, digest)
        if was_paused is None:
            self._core.resume()
        return target

    def _relabel(self, version: int) -> None:
        if self._session is not None and self._session.loaded:
            self._check_rises(version)
            self._check_complete(self._session)
            self._finish(version, "")
        elif version != self._core.version:
            self._check_rises(version)
            self._core.start_version(version)
