"""The session server as a process, over the router."""

from __future__ import annotations

from pathlib import Path

from miles.config import FaultConfig
from miles.faults import faulty_engine, session_store
from miles.roles.process import RoleSettings, announce, run_role
from miles_tito import SGLangEngine, TitoConfig
from miles_tito.serve import configured_family
from miles_tito.server import create_app, run_server


class SessionSettings(RoleSettings):
    """What the session server is told."""

    control_token: str
    tito: TitoConfig
    tokenizer: Path
    engine_url: str
    faults: tuple[FaultConfig, ...] = ()


def main(settings: SessionSettings) -> None:
    """Serve until the driver ends."""
    config = settings.tito.model_copy(update={"tokenizer": settings.tokenizer})
    family = configured_family(config)
    app = create_app(
        config,
        engine=faulty_engine(
            SGLangEngine.from_config(config.engine, url=settings.engine_url, token=settings.control_token),
            settings.faults,
        ),
        tokenizer=family.tokenizer,
        family=family,
        control_token=settings.control_token,
        store=session_store(family, config.session, settings.faults),
    )
    host = config.server.host
    run_server(
        app,
        host,
        config.server.port,
        lambda port: announce({"host": host, "port": port}),
        drain_timeout_s=config.server.drain_timeout_s,
    )


if __name__ == "__main__":
    run_role(SessionSettings, main)
