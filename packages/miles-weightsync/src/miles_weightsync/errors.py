"""Everything this package raises.

    WeightSyncError
    ├── TensorError          (ValueError)       a tensor's name, dtype, shape, size or digest record is not acceptable
    ├── UnitError            (ValueError)       load units do not form
    ├── LayoutError          (ValueError)       shards, offsets or slices do not fit
    ├── NameSetError         (ValueError)       names missing, extra or duplicate
    ├── FrameError           (ValueError)       a bucket frame is not acceptable
    ├── DeltaError           (ValueError)       a delta stream, chain or version directory is not acceptable
    ├── SessionError         (RuntimeError)     an engine refuses a call of an update session
    ├── LockError            (RuntimeError)     the update lock is held or lost
    ├── RequestVersionError  (ValueError)       a request names a version that is no version
    ├── WeightIdentityError  (ValueError)       stored bytes differ from the manifest
    ├── AuthError            (PermissionError)  the receiver does not know this token
    ├── ProtocolError        (ConnectionError)  the other side does not speak this protocol
    ├── TransportError       (ConnectionError)  bytes did not arrive
    ├── EngineUnreachableError (ConnectionError) no receiver answers at this address
    ├── RpcTimeoutError      (TimeoutError)     no answer before the deadline
    ├── AddressInUseError    (OSError)          the address that was asked for is taken
    ├── CheckpointError      (ValueError)       a folder is not a readable safetensors checkpoint
    ├── MissingExtraError    (ImportError)      an optional dependency is not installed
    └── UpdateFailedError    (RuntimeError)     no engine holds the new version

Each carries a stable `code` (the classes of the golden vectors where those name one) and the tensor names concerned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SHOWN_NAMES = 5


class WeightSyncError(Exception):
    """Root of all errors of this package. `code` is stable, `names` lists the tensors concerned."""

    def __init__(self, code: str, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.names = tuple(names)


class TensorError(WeightSyncError, ValueError):
    """Codes: name, duplicate_name, dtype, shape, size, manifest."""


class UnitError(WeightSyncError, ValueError):
    """Codes: unit, unit_incomplete."""


class LayoutError(WeightSyncError, ValueError):
    """Codes: shape, count, misaligned, replica_mismatch."""


class FrameError(WeightSyncError, ValueError):
    """Codes: magic, header_too_long, truncated, header, padding, dims, misaligned, offset_order, overlap, digest, …"""


class DeltaError(WeightSyncError, ValueError):
    """Codes: size, truncated, trailing, position, position_order, checksum, format, too_large, lineage, …"""


class SessionError(WeightSyncError, RuntimeError):
    """Codes: fenced, session_open, no_session, state, poisoned, stale, needs_full, order, conflict, incomplete, …"""


class LockError(WeightSyncError, RuntimeError):
    """Codes: locked, fenced."""


class RequestVersionError(WeightSyncError, ValueError):
    """Code: bad_request."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_request", message)


class AuthError(WeightSyncError, PermissionError):
    """Code: unauthorized."""

    def __init__(self, message: str) -> None:
        super().__init__("unauthorized", message)


class ProtocolError(WeightSyncError, ConnectionError):
    """Code: protocol."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


class TransportError(WeightSyncError, ConnectionError):
    """Code: transport."""

    def __init__(self, message: str) -> None:
        super().__init__("transport", message)


class EngineUnreachableError(WeightSyncError, ConnectionError):
    """Code: unreachable."""

    def __init__(self, message: str) -> None:
        super().__init__("unreachable", message)


class RpcTimeoutError(WeightSyncError, TimeoutError):
    """Code: timeout."""

    def __init__(self, message: str) -> None:
        super().__init__("timeout", message)


class AddressInUseError(WeightSyncError, OSError):
    """Code: address_in_use."""

    def __init__(self, message: str) -> None:
        super().__init__("address_in_use", message)


class CheckpointError(WeightSyncError, ValueError):
    """Code: checkpoint."""

    def __init__(self, message: str) -> None:
        super().__init__("checkpoint", message)


class MissingExtraError(WeightSyncError, ImportError):
    """Code: missing_extra."""

    def __init__(self, message: str) -> None:
        super().__init__("missing_extra", message)


class NameSetError(WeightSyncError, ValueError):
    """The tensors sent are not those the engine expects; lists every name of all three kinds. Code: name_set."""

    def __init__(self, missing: Sequence[str], extra: Sequence[str], duplicate: Sequence[str]) -> None:
        self.missing = tuple(sorted(missing))
        self.extra = tuple(sorted(extra))
        self.duplicate = tuple(sorted(duplicate))
        parts = [f"{kind}: {', '.join(names)}" for kind, names in self.by_kind().items() if names]
        message = (
            f"the tensors to send are not the tensors the engine expects ({'; '.join(parts)}): "
            "make the trainer's export and the engine's checkpoint agree"
        )
        super().__init__("name_set", message, (*self.missing, *self.extra, *self.duplicate))

    def by_kind(self) -> Mapping[str, tuple[str, ...]]:
        """The names as {"missing", "extra", "duplicate"}."""
        return {"missing": self.missing, "extra": self.extra, "duplicate": self.duplicate}


class WeightIdentityError(WeightSyncError, ValueError):
    """The bytes an engine has stored are not those of the manifest. `names`: the tensors. Code: weight_identity."""

    def __init__(self, message: str, names: Sequence[str] = (), engine: str = "") -> None:
        super().__init__("weight_identity", message, names)
        self.engine = engine


class UpdateFailedError(WeightSyncError, RuntimeError):
    """No engine holds the new version. `engine` and `phase` name the first failure. Code: update_failed."""

    def __init__(self, message: str, engine: str, phase: str) -> None:
        super().__init__("update_failed", message)
        self.engine = engine
        self.phase = phase


def shown(names: Sequence[str]) -> str:
    """The first few names for a message, with the count of the others."""
    text = ", ".join(names[:_SHOWN_NAMES])
    hidden = len(names) - _SHOWN_NAMES
    return f"{text} and {hidden} more" if hidden > 0 else text
