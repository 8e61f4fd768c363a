"""Weight identity for RL: atomic, verified, bit-exact weight updates from trainer to engines.

An engine opens its weights with `EngineReceiver`; a trainer installs versions on engines with `WeightPublisher`. The
rest are the pure functions both are made of.
"""

from __future__ import annotations

from miles_weightsync.bucket import BucketItem, PackedLayout, layout, layout_packed, plan_buckets
from miles_weightsync.config import (
    LockConfig,
    ReceiverConfig,
    RpcConfig,
    UnitsConfig,
    WeightSyncConfig,
)
from miles_weightsync.digest import digest_bytes
from miles_weightsync.errors import (
    AddressInUseError,
    AuthError,
    CheckpointError,
    DeltaError,
    EngineUnreachableError,
    FrameError,
    LayoutError,
    LockError,
    MissingExtraError,
    NameSetError,
    ProtocolError,
    RequestVersionError,
    RpcTimeoutError,
    SessionError,
    TensorError,
    TransportError,
    UnitError,
    UpdateFailedError,
    WeightIdentityError,
    WeightSyncError,
)
from miles_weightsync.frame import BucketHeader, Frame, TableEntry, build_frame, make_table, parse_frame
from miles_weightsync.lock import UpdateLock
from miles_weightsync.manifest import (
    Manifest,
    ManifestDiff,
    TensorRecord,
    diff_manifests,
    dumps_manifest,
    loads_manifest,
    manifest_of,
)
from miles_weightsync.names import canonical_order, check_name, check_names
from miles_weightsync.outgoing import consume_only
from miles_weightsync.plan import broadcast_groups, plan_p2p, slice_table
from miles_weightsync.policy import UpdateOutcome, UpdatePlan, run_update
from miles_weightsync.protocols import Encoder, WeightPort, WeightSource, WireTensor
from miles_weightsync.publisher import WeightPublisher
from miles_weightsync.receiver import EngineReceiver
from miles_weightsync.report import EngineOutcome, UpdateEvent, UpdateReport, VerifyReport
from miles_weightsync.sink import ReceiverSink, RemoteDescription
from miles_weightsync.state import ReceiverState, Session
from miles_weightsync.tensors import RawTensor, Spec, as_wire
from miles_weightsync.transports import Transport, make_transport
from miles_weightsync.units import Companion, form_units
from miles_weightsync.versions import Replica, decide, version_spans

__all__ = [
    "AddressInUseError",
    "AuthError",
    "BucketHeader",
    "BucketItem",
    "CheckpointError",
    "Companion",
    "DeltaError",
    "Encoder",
    "EngineOutcome",
    "EngineReceiver",
    "EngineUnreachableError",
    "Frame",
    "FrameError",
    "LayoutError",
    "LockConfig",
    "LockError",
    "Manifest",
    "ManifestDiff",
    "MissingExtraError",
    "NameSetError",
    "PackedLayout",
    "ProtocolError",
    "RawTensor",
    "ReceiverConfig",
    "ReceiverSink",
    "ReceiverState",
    "RemoteDescription",
    "Replica",
    "RequestVersionError",
    "RpcConfig",
    "RpcTimeoutError",
    "Session",
    "SessionError",
    "Spec",
    "TableEntry",
    "TensorError",
    "TensorRecord",
    "Transport",
    "TransportError",
    "UnitError",
    "UnitsConfig",
    "UpdateEvent",
    "UpdateFailedError",
    "UpdateLock",
    "UpdateOutcome",
    "UpdatePlan",
    "UpdateReport",
    "VerifyReport",
    "WeightIdentityError",
    "WeightPort",
    "WeightPublisher",
    "WeightSource",
    "WeightSyncConfig",
    "WeightSyncError",
    "WireTensor",
    "as_wire",
    "broadcast_groups",
    "build_frame",
    "canonical_order",
    "check_name",
    "check_names",
    "consume_only",
    "decide",
    "diff_manifests",
    "digest_bytes",
    "dumps_manifest",
    "form_units",
    "layout",
    "layout_packed",
    "loads_manifest",
    "make_table",
    "make_transport",
    "manifest_of",
    "parse_frame",
    "plan_buckets",
    "plan_p2p",
    "run_update",
    "slice_table",
    "version_spans",
]
