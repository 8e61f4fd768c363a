"""The state machines of the golden vectors: scripts of events in, what each did out.

The same `ReceiverState`, `UpdateLock` and `run_update` that the live receiver and publisher run on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_weightsync.errors import LockError, SessionError
from miles_weightsync.lock import UpdateLock
from miles_weightsync.policy import UpdatePlan, Verdict, Verdicts, run_update
from miles_weightsync.state import ReceiverState, Session

Params = Mapping[str, Any]


def receiver_events(params: Params, events: Any) -> Any:
    """Play events on one receiver's state."""
    state = ReceiverState(**params)
    return [_receiver_event(state, event) for event in events]


def _receiver_event(state: ReceiverState, event: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = _EVENTS[event["ev"]](state, event) or "ok"
    except SessionError as error:
        result = f"error:{error.code}"
    view = state.describe()
    answer = {"result": result, "state": view.state, "version": view.version, "routable": view.routable}
    return answer | {"epoch": view.epoch, "manifest": view.manifest} if event["ev"] == "describe" else answer


def _begin(state: ReceiverState, event: Mapping[str, Any]) -> None:
    state.begin(Session(event["session"], event["token"], event["target"], event["buckets"], event["full"]))


def _bucket(state: ReceiverState, event: Mapping[str, Any]) -> str | None:
    if state.admit_bucket(event["token"], event["session"], event["index"], event["digest"]) == "ignored":
        return "ignored"
    if event.get("corrupt"):
        raise state.bucket_corrupt(event["index"])
    if event.get("load_fails"):
        raise state.load_failed("scripted")
    state.bucket_applied(event["digest"])
    return None


def _commit(state: ReceiverState, event: Mapping[str, Any]) -> str | None:
    if state.admit_commit(event["token"], event["session"], event["version"], event["manifest"]) == "ignored":
        return "ignored"
    state.commit(event["manifest"], event["computed"])
    return None


_EVENTS: Mapping[str, Callable[[ReceiverState, Mapping[str, Any]], str | None]] = {
    "pause": lambda state, event: state.pause(),
    "resume": lambda state, event: state.resume(),
    "begin": _begin,
    "bucket": _bucket,
    "commit": _commit,
    "abort": lambda state, event: state.abort(event["token"], event["session"]),
    "timeout": lambda state, event: state.timeout(),
    "restart": lambda state, event: state.restart(),
    "describe": lambda state, event: None,
}


def lock_events(params: Params, events: Any) -> Any:
    """Play events on the update lock."""
    lock = UpdateLock(params["lease_s"])
    return [_lock_event(lock, event) for event in events]


def _lock_event(lock: UpdateLock, event: Mapping[str, Any]) -> dict[str, Any]:
    owner, now_s, token = event["owner"], event["now"], event.get("token")
    try:
        if event["ev"] == "acquire":
            token = lock.acquire(owner, now_s)
        else:
            getattr(lock, event["ev"])(owner, token, now_s)
        result = "ok"
    except LockError as error:
        result, token = f"error:{error.code}", None
    return {"result": result, "token": token, "holder": lock.holder(now_s)}


def publish_update(params: Params, given: Any) -> Any:
    """Run one update on a fleet with scripted faults."""
    plan = UpdatePlan(
        delivery=params["transport"],
        version=params["version"],
        target=params["target"],
        engines=tuple(given["engines"]),
        buckets=tuple(given["buckets"]),
        flush=params.get("pause_mode") != "in_place",
    )
    outcome = run_update(ScriptedFleet(given["faults"]), plan)
    engines = {
        engine: {"state": fate.state, "version": fate.version, "in_router": fate.in_router}
        for engine, fate in outcome.engines.items()
    }
    return {"outcome": outcome.outcome, "actions": outcome.actions, "engines": engines}


_PREFLIGHT: Mapping[str, Verdict] = {"unreachable": "unreachable", "incompatible": "incompatible"}
_BUCKET: Mapping[str, Verdict] = {
    "dies": "died",
    "corrupt_once": "corrupt",
    "corrupt_twice": "corrupt",
    "load_false": "refused",
}
_COMMIT: Mapping[str, Verdict] = {
    "commit_dies": "died",
    "commit_false": "refused",
    "commit_digest": "refused",
    "commit_lost": "lost",
}


@dataclass
class ScriptedFleet:
    """A fleet in which each engine fails as its faults say: {engine, kind, bucket?, describe?}."""

    faults: Sequence[Mapping[str, Any]]

    def lock(self) -> None:
        """Always granted."""

    def preflight(self, engines: Sequence[str]) -> Verdicts:
        return self._verdicts(engines, _PREFLIGHT)

    def transfer(self, engines: Sequence[str]) -> Verdicts:
        return self._verdicts(engines, {"disk_full": "kept"})

    def pause(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def flush(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def begin(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def bucket(self, label: str, engines: Sequence[str]) -> Verdicts:
        return self._verdicts(engines, _BUCKET, label)

    def retry(self, label: str, engine: str) -> Verdict:
        return "corrupt" if self._fault(engine, ("corrupt_twice",), label) else "ok"

    def barrier(self) -> None:
        """Nothing is in flight."""

    def abort(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def rebuild(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def load(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def commit(self, engines: Sequence[str]) -> Verdicts:
        return self._verdicts(engines, _COMMIT)

    def describe(self, engine: str) -> bool:
        """Version and manifest must both agree; the scripted manifest is only right together with the version."""
        fault = self._fault(engine, ("commit_lost",))
        return bool(fault and fault["describe"]["manifest_ok"])

    def resume(self, engines: Sequence[str]) -> Verdicts:
        return self._all_ok(engines)

    def unlock(self) -> None:
        """Nothing to give back."""

    def _all_ok(self, engines: Sequence[str]) -> Verdicts:
        return dict.fromkeys(engines, "ok")

    def _verdicts(self, engines: Sequence[str], kinds: Mapping[str, Verdict], label: str | None = None) -> Verdicts:
        faults = {engine: self._fault(engine, tuple(kinds), label) for engine in engines}
        return {engine: kinds[fault["kind"]] if fault else "ok" for engine, fault in faults.items()}

    def _fault(self, engine: str, kinds: Sequence[str], label: str | None = None) -> Mapping[str, Any] | None:
        for fault in self.faults:
            if fault["engine"] == engine and fault["kind"] in kinds and label in (None, fault.get("bucket")):
                return fault
        return None
