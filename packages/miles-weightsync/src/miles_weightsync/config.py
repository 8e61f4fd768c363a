"""Configuration: one frozen tree, `WeightSyncConfig`. A component receives only its own section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from miles_weightsync.protocols import PauseMode
from miles_weightsync.units import WEIGHT_COMPANIONS, Companion

TransportKind = Literal["shm", "gloo", "tcp"]
VerifyMode = Literal["full", "probe", "off"]

_MIB = 1024 * 1024


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RpcConfig(_Section):
    """Waits of the publisher for its engines."""

    connect_timeout_s: float = Field(default=5.0, gt=0, description="Longest wait for a receiver to take a connection.")
    timeout_s: float = Field(
        default=120.0, gt=0, description="Longest wait for the answer to one call, payload included."
    )
    lock_wait_s: float = Field(
        default=120.0, ge=0, description="How long taking an engine's update lock is tried again."
    )
    flush_timeout_s: float = Field(default=60.0, ge=0, description="How long flushing the prefix cache is tried again.")


class LockConfig(_Section):
    """The update lock that each engine grants."""

    lease_s: float = Field(default=600.0, gt=0, description="A lease ends this long after its last use.")


class UnitsConfig(_Section):
    """Which tensors must reach an engine in one load call."""

    rules: tuple[tuple[str, ...], ...] = Field(
        default=(), description="Suffix sets; the names under one prefix are one unit."
    )
    companions: tuple[Companion, ...] = Field(
        default=WEIGHT_COMPANIONS, description="Suffixes of tensors that travel with the weight they belong to."
    )


class ReceiverConfig(_Section):
    """The receiver in the engine process."""

    session_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="An update session without a call for this long is aborted; the engine is poisoned.",
    )
    hello_timeout_s: float = Field(default=5.0, gt=0, description="A connection must show its token within this time.")
    max_connections: int = Field(default=32, ge=1, description="Connections served at a time; further ones are closed.")
    lock: LockConfig = Field(default=LockConfig(), description="The update lock of this engine.")
    shm_dir: Path | None = Field(
        default=None, description="Folder of shared segments, for both sides; default /dev/shm if there is one."
    )


class WeightSyncConfig(_Section):
    """Weight updates from trainer to engines."""

    transport: TransportKind = Field(
        default="shm", description="How buckets travel: shared memory, gloo broadcast or TCP."
    )
    bucket_bytes: int = Field(default=512 * _MIB, ge=1, description="Capacity of a bucket in bytes on the wire.")
    pause_mode: PauseMode = Field(default="retract", description="What becomes of requests in flight during an update.")
    verify: VerifyMode = Field(default="full", description="Stored tensors to read back and digest before commit.")
    rpc: RpcConfig = Field(default=RpcConfig(), description="Deadlines of calls to engines.")
    units: UnitsConfig = Field(default=UnitsConfig(), description="Load units.")
    receiver: ReceiverConfig = Field(default=ReceiverConfig(), description="The engine's side.")
