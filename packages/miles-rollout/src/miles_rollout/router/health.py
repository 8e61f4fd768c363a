"""Probing engines: alive, which version, which identity. All engines are probed at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import httpx

from miles_rollout.config import RouterConfig
from miles_rollout.router.fleet import Engine, Fleet

logger = logging.getLogger(__name__)

MAX_VERSION_DIGITS = 18


class HealthMonitor:
    """Keeps the fleet's view of its engines current."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, config: RouterConfig) -> None:
        self._fleet = fleet
        self._client = client
        self._config = config

    async def watch(self) -> None:
        """Probe all engines after every interval, until cancelled."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await self.probe_all()

    async def probe_all(self) -> None:
        await asyncio.gather(*(self.probe(engine) for engine in self._fleet))

    async def probe(self, engine: Engine) -> None:
        """Ask one engine for its health and model, and record the answer."""
        was = engine.healthy
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                (await self._client.get(f"{engine.url}/health")).raise_for_status()
                info = await self._model_info(engine)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            self._fleet.record_failure(engine, f"{type(error).__name__}: {error}")
        else:
            self._fleet.record_success(engine, version=_version(info), engine_id=_text(info.get("engine_id")))
        if engine.healthy != was:
            logger.warning("engine %s (%s) is %s", engine.worker_id, engine.url, _state(engine))

    async def _model_info(self, engine: Engine) -> Mapping[str, Any]:
        """What the engine says about itself; nothing where it has no such route."""
        for path in ("/model_info", "/get_model_info"):
            answer = await self._client.get(f"{engine.url}{path}")
            if answer.status_code != httpx.codes.NOT_FOUND:
                answer.raise_for_status()
                info = answer.json()
                if not isinstance(info, dict):
                    raise ValueError(f"{path} answers with {type(info).__name__}, not an object")
                return info
        return {}


def _version(info: Mapping[str, Any]) -> int | None:
    """The weight version; stock SGLang's `default` is the boot checkpoint, 0."""
    value = str(info.get("weight_version", ""))
    if value == "default":
        return 0
    return int(value) if value.isdecimal() and len(value) <= MAX_VERSION_DIGITS else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _state(engine: Engine) -> str:
    return "routable" if engine.healthy else f"quarantined: {engine.reason}"
