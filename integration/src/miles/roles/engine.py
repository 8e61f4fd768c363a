"""An engine as a process: miles-rollout's server with miles-weightsync's receiver attached to its weight port."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from miles.config import FaultConfig, NumericsConfig
from miles.faults import faulty_port
from miles.roles.process import RoleSettings, announce, run_role
from miles.wiring.numerics import numerics_of
from miles_rollout import EngineConfig, EngineServerConfig
from miles_rollout.local.engine import LocalEngine
from miles_rollout.server.run import serve_engine
from miles_weightsync import EngineReceiver, WeightSyncConfig


class EngineSettings(RoleSettings):
    """What an engine process is told."""

    model: Path
    control_token: str
    engine: EngineConfig
    weightsync: WeightSyncConfig
    numerics: NumericsConfig
    faults: tuple[FaultConfig, ...] = ()


def main(settings: EngineSettings) -> None:
    """Serve until the driver ends."""

    @contextmanager
    def receiving(engine: LocalEngine) -> Iterator[Mapping[str, object]]:
        token = secrets.token_hex(16)
        port = faulty_port(engine.port, settings.faults)
        with EngineReceiver(port, token=token, config=settings.weightsync.receiver) as receiver:
            yield {"receiver": {"address": receiver.address, "token": token}}

    serve_engine(
        EngineServerConfig(
            model_dir=settings.model, name=settings.name, control_token=settings.control_token, engine=settings.engine
        ),
        numerics=numerics_of(settings.numerics),
        attach=receiving,
        announce=announce,
    )


if __name__ == "__main__":
    run_role(EngineSettings, main)
