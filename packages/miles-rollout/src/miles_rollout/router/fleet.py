"""The engines the router knows, and which of them may be routed to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

_RANK = re.compile(r"@\d+$")


def base_urls(urls: Iterable[str]) -> list[str]:
    """Engine addresses without the `@rank` of data-parallel ranks, each once, in order."""
    return list(dict.fromkeys(_RANK.sub("", url).rstrip("/") for url in urls))


def check_url(url: object) -> str:
    """The URL of one engine, normalised. Raises ValueError when it is none."""
    if not isinstance(url, str) or not url:
        raise ValueError("a worker needs a url, such as http://127.0.0.1:30000")
    if _RANK.search(url):
        raise ValueError(f"{url}: register the engine's address without @rank; this router does not pick ranks")
    try:
        parsed = httpx.URL(url)
        known = parsed.scheme in {"http", "https"} and bool(parsed.raw_host) and (parsed.port or 1) < 65536
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{url!r:.200} is no http address: {error}") from error
    if not known or "%" in parsed.host or parsed.query or parsed.fragment or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r:.200} is no http address of an engine")
    return url.rstrip("/")


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. `load` counts requests under way; a version is None while unknown."""

    worker_id: str
    url: str
    healthy: bool = False
    load: int = 0
    failures: int = 0
    successes: int = 0
    version: int | None = None
    engine_id: str | None = None
    reason: str = "not probed yet"

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.worker_id,
            "url": self.url,
            "worker_type": "regular",
            "is_healthy": self.healthy,
            "load": self.load,
            "weight_version": None if self.version is None else str(self.version),
            "engine_id": self.engine_id,
            "reason": None if self.healthy else self.reason,
        }


class Fleet:
    """The engines in the order they were added, and the version the fleet is at.

    The fleet's version is the highest that a routable engine ever reported; an empty fleet has none. An engine below it
    is not routable: it was restarted and has not received the current weights. One that reports none is let through.
    """

    def __init__(self, *, failure_threshold: int, success_threshold: int) -> None:
        self._failure_threshold = failure_threshold
        self._success_threshold = success_threshold
        self._engines: dict[str, Engine] = {}
        self._added = 0
        self.version: int | None = None

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def routable(self) -> list[Engine]:
        return [engine for engine in self if engine.healthy]

    def by_url(self, url: str) -> Engine | None:
        return next((engine for engine in self if engine.url == url), None)

    def by_id(self, worker_id: str) -> Engine | None:
        return self._engines.get(worker_id)

    def add(self, url: str) -> Engine:
        """The engine at this URL; adding a known one clears its quarantine. It becomes routable with its next probe."""
        engine = self.by_url(url)
        if engine is None:
            self._added += 1
            engine = Engine(f"w{self._added}", url)
            self._engines[engine.worker_id] = engine
        engine.failures = 0
        if not engine.healthy:
            engine.successes = self._success_threshold - 1
        return engine

    def remove(self, engine: Engine) -> None:
        self._engines.pop(engine.worker_id, None)
        engine.healthy = False
        if not self._engines:
            self.version = None

    def record_failure(self, engine: Engine, reason: str) -> None:
        """A probe or a connection failed; enough in a row quarantine the engine."""
        engine.failures += 1
        engine.successes = 0
        if engine.failures >= self._failure_threshold:
            self._quarantine(engine, f"{engine.failures} failures in a row, the last: {reason}")

    def record_success(self, engine: Engine, *, version: int | None, engine_id: str | None) -> None:
        """A probe succeeded and told the engine's version and identity."""
        engine.failures = 0
        went_back = None not in (version, engine.version) and _number(version) < _number(engine.version)
        engine.version, engine.engine_id = version, engine_id
        if self._outdated(engine) and (went_back or not engine.healthy):
            self._quarantine(engine, f"it is at version {version} and the fleet at {self.version}")
            return
        engine.successes += 1
        if not engine.healthy and engine.successes < self._success_threshold:
            return
        engine.healthy = True
        if version is not None:
            self.version = version if self.version is None else max(self.version, version)

    def _outdated(self, engine: Engine) -> bool:
        return None not in (engine.version, self.version) and _number(engine.version) < _number(self.version)

    def _quarantine(self, engine: Engine, reason: str) -> None:
        engine.healthy = False
        engine.successes = 0
        engine.reason = reason


def _number(version: int | None) -> int:
    assert version is not None
    return version
