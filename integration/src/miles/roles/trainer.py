"""One trainer rank as a process: trains groups, publishes weights, saves.

Calls: `connect`, `train`, `publish`, `verify`, `save`, `save_hf`. Every rank gets every call; rank 0 owns the weights
on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from miles.config import FaultConfig, NumericsConfig
from miles.faults import drop_acknowledgement
from miles.ports import listen
from miles.roles.process import RoleSettings, announce, run_role
from miles.rpc import Buffers, serve_calls
from miles.wiring.numerics import numerics_of
from miles.wiring.samples import prompt_keys, verified_batch
from miles.wiring.weights import Publishing, ReceiverAddress
from miles_trainer import Trainer, TrainerConfig
from miles_weightsync import WeightSyncConfig


class TrainerSettings(RoleSettings):
    """What a trainer rank is told."""

    model: Path
    rank: int
    ranks: int
    init_method: str | None
    trainer: TrainerConfig
    weightsync: WeightSyncConfig
    numerics: NumericsConfig
    faults: tuple[FaultConfig, ...] = ()


class TrainerRole:
    """The calls of a trainer rank."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._trainer = Trainer(
            settings.trainer,
            settings.model,
            rank=settings.rank,
            world_size=settings.ranks,
            init_method=settings.init_method,
            numerics=numerics_of(settings.numerics),
        )
        self._publishing: Publishing | None = None
        self._version: int | None = None

    def connect(self, arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
        """Reach the engines' receivers."""
        addresses = [ReceiverAddress.model_validate(item) for item in arguments["receivers"]]
        self._publishing = Publishing(self._trainer, addresses, self._settings.weightsync, rank=self._settings.rank)
        return {}, ()

    def train(self, arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
        """One step on groups (group v1 bytes). Nothing is trained when a record does not match its digest."""
        batch = verified_batch(buffers, version=self._version, experts_wanted=self._settings.trainer.replay.enabled)
        step = int(arguments["step"])
        began = time.monotonic()
        report = self._trainer.train(batch.samples, step=step)
        acknowledged = drop_acknowledgement(prompt_keys(buffers), self._settings.faults, step)
        metrics = {
            **report.metrics,
            **batch.metrics(),
            "time/train_compute_s": time.monotonic() - began,
        }
        return {"metrics": metrics, "trained": acknowledged}, ()

    def publish(self, arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
        """Give the current weights to all engines as a version; returns the update's report."""
        self._version = int(arguments["version"])
        return self._connected().publish(self._version), ()

    def verify(self, arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
        """Compare the engines' stored weights with ours, without an update."""
        self._version = int(arguments["version"])
        return self._connected().verify(self._version), ()

    def save(self, arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
        """Save a checkpoint."""
        self._trainer.save(Path(arguments["path"]))
        return {}, ()

    def save_hf(self, arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
        """Write a Hugging Face folder."""
        self._trainer.export("F32").save_hf(Path(arguments["path"]))
        return {}, ()

    def _connected(self) -> Publishing:
        if self._publishing is None:
            raise RuntimeError("call `connect` first: this trainer knows no engines")
        return self._publishing


def main(settings: TrainerSettings) -> None:
    """Build the trainer, announce it, answer calls."""
    torch.set_num_threads(1)
    role = TrainerRole(settings)
    with listen() as listener:
        host, port = listener.getsockname()
        announce({"host": host, "call_port": port})
        calls = (role.connect, role.train, role.publish, role.verify, role.save, role.save_hf)
        serve_calls(listener, settings.token, {call.__name__: call for call in calls})


if __name__ == "__main__":
    run_role(TrainerSettings, main)
