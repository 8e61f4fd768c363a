"""How an engine is chosen."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from miles_rollout.config import RouterConfig, RouterPolicyName
from miles_rollout.router.fleet import Engine

Clock = Callable[[], float]


class Policy(Protocol):
    """Chooses among routable engines, of which there is at least one. With `needs_key` each request must have a key."""

    needs_key: bool

    def choose(self, engines: Sequence[Engine], key: str | None) -> Engine: ...


class RoundRobin:
    """Each in turn."""

    needs_key = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, engines: Sequence[Engine], key: str | None) -> Engine:
        self._next += 1
        return engines[(self._next - 1) % len(engines)]


class LeastLoad:
    """The one with the fewest requests under way; the first of several."""

    needs_key = False

    def choose(self, engines: Sequence[Engine], key: str | None) -> Engine:
        return min(engines, key=lambda engine: engine.load)


class Manual:
    """A table from key to engine. A key keeps its engine while that is routable, and loses it after `key_idle_s`.

    A new key goes to the engine with the fewest requests under way, of several the one with the fewest keys
    (`min_load`), or to a random one.
    """

    needs_key = True

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._random = random.Random(config.seed)
        self._places: OrderedDict[str, tuple[Engine, float]] = OrderedDict()
        self._keys: Counter[Engine] = Counter()

    def choose(self, engines: Sequence[Engine], key: str | None) -> Engine:
        self._evict()
        if key is None:
            return self._assign(engines)
        place = self._places.pop(key, None)
        if place is not None:
            self._uncount(place[0])
        engine = place[0] if place is not None and place[0] in engines else self._assign(engines)
        self._places[key] = (engine, self._clock())
        self._keys[engine] += 1
        return engine

    def __len__(self) -> int:
        return len(self._places)

    def _assign(self, engines: Sequence[Engine]) -> Engine:
        if self._config.assignment == "random":
            return self._random.choice(engines)
        return min(engines, key=lambda engine: (engine.load, self._keys[engine]))

    def _evict(self) -> None:
        """Keys stand in the order of their last use, so the idle ones come first."""
        horizon = self._clock() - self._config.key_idle_s
        while self._places:
            key, (engine, used) = next(iter(self._places.items()))
            if used > horizon:
                return
            del self._places[key]
            self._uncount(engine)

    def _uncount(self, engine: Engine) -> None:
        self._keys[engine] -= 1
        if not self._keys[engine]:
            del self._keys[engine]


POLICIES: dict[RouterPolicyName, Callable[[RouterConfig, Clock], Policy]] = {
    "manual": Manual,
    "round_robin": lambda config, clock: RoundRobin(),
    "least_load": lambda config, clock: LeastLoad(),
}
