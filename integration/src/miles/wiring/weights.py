"""Trainer weights to engines: the trainer's export as the publisher's source, receivers as its sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from miles.errors import ConfigError
from miles_trainer import Trainer
from miles_weightsync import ReceiverSink, WeightPublisher, WeightSyncConfig


class ReceiverAddress(BaseModel):
    """Where an engine takes weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str
    token: str


class Publishing:
    """The weights of one trainer rank on their way out. Rank 0 publishes; the others take part in the gather."""

    def __init__(
        self, trainer: Trainer, receivers: Sequence[ReceiverAddress], config: WeightSyncConfig, *, rank: int
    ) -> None:
        rpc = config.rpc
        sinks = [
            ReceiverSink(r.address, r.token, timeout_s=rpc.timeout_s, connect_timeout_s=rpc.connect_timeout_s)
            for r in receivers
        ]
        self._rank = rank
        source = trainer.export("F32", dtypes=stored_dtypes(sinks))
        self._publisher = WeightPublisher(source, sinks if rank == 0 else (), config=config, rank=rank)

    def publish(self, version: int) -> dict[str, Any]:
        """Install the current weights as `version` everywhere.

        Raises what the publisher raises, and the error of an engine that was left out: the run does not go on with
        fewer engines than it was given.
        """
        if self._rank != 0:
            self._publisher.consume_only()
            return {}
        report = self._publisher.publish(version)
        left_out = next((engine.error for engine in report.engines if engine.error is not None), None)
        if left_out is not None:
            raise left_out
        return {
            "manifest_digest": report.digest,
            "tensors_verified": report.tensors_verified,
            "wire_bytes": report.wire_bytes,
            "seconds": dict(report.seconds),
            "engines": {engine.engine_id: engine.version for engine in report.engines},
        }

    def verify(self, version: int) -> dict[str, Any]:
        """Compare what every engine stores with the current weights."""
        if self._rank != 0:
            self._publisher.consume_only()
            return {}
        report = self._publisher.verify(version)
        tensors = len(report.manifest.tensors) * len(report.engines)
        return {"manifest_digest": report.digest, "tensors_verified": tensors}


def stored_dtypes(sinks: Sequence[ReceiverSink]) -> dict[str, Literal["BF16", "F32"]]:
    """The dtype of each tensor as the engines store it; they must agree, since one manifest serves all."""
    dtypes: dict[str, Literal["BF16", "F32"]] = {}
    for sink in sinks:
        for spec in sink.describe().expected_tensors:
            if spec.dtype not in ("BF16", "F32"):
                raise ConfigError(
                    f"engine {sink.address} stores {spec.name} as {spec.dtype}: only BF16 and F32 are wired"
                )
            stored: Literal["BF16", "F32"] = "BF16" if spec.dtype == "BF16" else "F32"
            if dtypes.setdefault(spec.name, stored) != stored:
                raise ConfigError(
                    f"engines store {spec.name} as {dtypes[spec.name]} and {stored}: give all the same dtype"
                )
    return dtypes
