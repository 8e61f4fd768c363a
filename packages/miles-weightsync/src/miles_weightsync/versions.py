"""Requests and versions: which replicas may answer, and the spans of versions in a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from miles_weightsync.errors import RequestVersionError

ReplicaState = Literal["serving", "paused", "updating", "verifying", "poisoned", "stale", "dead"]
_GONE = ("poisoned", "stale", "dead")
_MOVING = ("updating", "verifying")


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine as the router sees it. `target` is the version it is being updated to."""

    id: str
    version: int | None
    state: ReplicaState
    target: int | None = None
    run_id: str | None = None

    @property
    def heading(self) -> int | None:
        """The version it holds, or will hold once its update is through."""
        return self.target if self.state in _MOVING and self.target is not None else self.version


@dataclass(frozen=True, slots=True)
class Decision:
    """What to answer: `serve` by one of `replicas`, `retryable` (503, or 409 when an exact version is awaited), …"""

    decision: Literal["serve", "retryable", "conflict", "bad_request"]
    status: int
    retryable: bool = False
    replicas: tuple[str, ...] = ()


_WAIT = Decision("retryable", 503, retryable=True)
_CONFLICT = Decision("conflict", 409)


def parse_version(text: Any) -> int:
    """A version from its wire text: ASCII digits, leading zeros allowed. Raises RequestVersionError."""
    if not (isinstance(text, str) and text.isascii() and text.isdigit()):
        raise RequestVersionError(f"version {text!r:.40} is not decimal text such as '7'")
    return int(text)


def decide(replicas: Sequence[Replica], request: Mapping[str, Any]) -> Decision:
    """Which replicas may answer a request with `min_version`, `exact_version`, `run_id`; never an older version."""
    try:
        minimum, exact = (
            None if request.get(key) is None else parse_version(request[key])
            for key in ("min_version", "exact_version")
        )
    except RequestVersionError:
        return Decision("bad_request", 400)
    if minimum is not None and exact is not None and exact < minimum:
        return Decision("bad_request", 400)
    run = request.get("run_id")
    mine = [replica for replica in replicas if run is None or replica.run_id == run]
    if run is not None and not mine:
        return _CONFLICT
    serving = tuple(r.id for r in mine if r.state == "serving" and _matches(r.version, minimum, exact))
    if serving:
        return Decision("serve", 200, replicas=serving)
    return _no_match([r for r in mine if r.state not in _GONE], exact)


def _matches(version: int | None, minimum: int | None, exact: int | None) -> bool:
    if version is None:
        return False
    return (exact is None or version == exact) and (minimum is None or version >= minimum)


def _no_match(live: Sequence[Replica], exact: int | None) -> Decision:
    if exact is None or not live:
        return _WAIT
    if any(replica.heading is not None and replica.heading <= exact for replica in live):
        return Decision("retryable", 409, retryable=True)
    return _CONFLICT


@dataclass(frozen=True, slots=True)
class VersionSpans:
    """Versions of a reply's tokens: of the first, of the last, and runs of (version, tokens)."""

    first: int | None
    last: int | None
    spans: tuple[tuple[int, int], ...]


def version_spans(versions: Sequence[int]) -> VersionSpans:
    """Spans from the version of each token."""
    spans = tuple((version, len(list(run))) for version, run in groupby(versions))
    return VersionSpans(versions[0], versions[-1], spans) if versions else VersionSpans(None, None, ())
