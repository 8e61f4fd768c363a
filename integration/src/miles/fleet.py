"""The roles of one run, started in the order they need each other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config import RunConfig
from miles.ports import free_port
from miles.rpc import RoleClient
from miles.runtime import Role, RoleSpec, Runtime
from miles_tito.client import SessionServerClient


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything the driver talks to."""

    roles: tuple[Role, ...]
    trainers: tuple[RoleClient, ...]
    sessions: SessionServerClient
    engine_ids: tuple[str, ...]

    def check_alive(self) -> None:
        """Raise `RoleDiedError` for the first role that has ended."""
        for role in self.roles:
            role.check_alive()

    async def trainer_call(
        self, name: str, arguments: Mapping[str, Any], buffers: Sequence[bytes] = (), *, timeout_s: float
    ) -> dict[str, Any]:
        """Make the same call to every trainer rank; returns the answer of rank 0 or raises the first error."""
        calls = [trainer.call(name, arguments, buffers, timeout_s=timeout_s) for trainer in self.trainers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers[0][0]  # type: ignore[index]  # no exception is left in the list

    async def aclose(self) -> None:
        """Close connections; the runtime ends the roles."""
        await self.sessions.aclose()
        for trainer in self.trainers:
            await trainer.aclose()


async def start_fleet(config: RunConfig, runtime: Runtime, model: Path) -> Fleet:
    """Start trainer ranks and engines together, then router and session server; connect trainer and engines."""
    ranks = config.runtime.trainer_ranks
    master_port = free_port()
    control_token = secrets.token_hex(16)
    starts = [runtime.start(_trainer(config, model, rank, master_port)) for rank in range(ranks)]
    starts += [runtime.start(_engine(config, model, index, control_token)) for index in range(config.runtime.engines)]
    started = await asyncio.gather(*starts)
    trainers, engines = started[:ranks], started[ranks:]
    router = await runtime.start(_router(config, engines, control_token))
    sessions = await runtime.start(_sessions(config, model, router, control_token))
    client = SessionServerClient(_url(sessions), control_token=control_token)
    fleet = Fleet(
        roles=(*trainers, *engines, router, sessions),
        trainers=tuple(trainer.client() for trainer in trainers),
        sessions=client,
        engine_ids=tuple(str(engine.ready["engine_id"]) for engine in engines),
    )
    receivers = [engine.ready["receiver"] for engine in engines]
    await fleet.trainer_call("connect", {"receivers": receivers}, timeout_s=config.runtime.start_timeout_s)
    return fleet


def _trainer(config: RunConfig, model: Path, rank: int, master_port: int) -> RoleSpec:
    settings = {
        "model": str(model),
        "rank": rank,
        "ranks": config.runtime.trainer_ranks,
        "init_method": f"tcp://127.0.0.1:{master_port}" if config.runtime.trainer_ranks > 1 else None,
        "trainer": config.trainer.model_dump(mode="json"),
        "weightsync": config.weightsync.model_dump(mode="json"),
        "numerics": config.numerics.model_dump(mode="json"),
        "faults": _faults(config, "drop_ledger_entry"),
    }
    return RoleSpec("trainer", f"trainer-{rank}", settings)


def _engine(config: RunConfig, model: Path, index: int, control_token: str) -> RoleSpec:
    settings = {
        "model": str(model),
        "control_token": control_token,
        "engine": config.rollout.engine.model_dump(mode="json"),
        "weightsync": config.weightsync.model_dump(mode="json"),
        "numerics": config.numerics.model_dump(mode="json"),
        "faults": _faults(config, "flip_weight_bit") if index == 0 else [],
    }
    return RoleSpec("engine", f"engine-{index}", settings)


def _router(config: RunConfig, engines: Sequence[Role], control_token: str) -> RoleSpec:
    settings = {
        "control_token": control_token,
        "router": config.rollout.router.model_dump(mode="json"),
        "workers": [_url(engine) for engine in engines],
    }
    return RoleSpec("router", "router", settings)


def _sessions(config: RunConfig, model: Path, router: Role, control_token: str) -> RoleSpec:
    settings = {
        "control_token": control_token,
        "tito": config.tito.model_dump(mode="json"),
        "tokenizer": str(model),
        "engine_url": _url(router),
        "faults": _faults(config, "flip_token", "swap_experts", "shift_version"),
    }
    return RoleSpec("sessions", "sessions", settings)


def _faults(config: RunConfig, *kinds: str) -> list[dict[str, Any]]:
    return [fault.model_dump(mode="json") for fault in config.faults if fault.kind in kinds]


def _url(role: Role) -> str:
    return f"http://{role.ready['host']}:{role.ready['port']}"
