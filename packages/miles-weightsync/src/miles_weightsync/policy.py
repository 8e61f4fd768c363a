"""How one update of a fleet runs: the order of its steps, and what becomes of engines that fail in one.

`run_update` decides; a `Fleet` acts. The live fleet is `miles_weightsync.fleet.SinkFleet`, the golden vectors play a
scripted one, so that both run the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Delivery = Literal["broadcast", "p2p", "disk-delta"]
"""How bytes reach engines: all in one collective, each on its own, or through files before the pause."""

Verdict = Literal["ok", "unreachable", "incompatible", "died", "refused", "corrupt", "lost", "kept"]
"""What a step did to an engine. `refused`: it answered that it failed; `corrupt`: a bucket arrived damaged and may be
sent again; `lost`: the answer to a commit did not arrive; `kept`: it failed with its old version whole."""

Verdicts = Mapping[str, Verdict]

FinalState = Literal["serving", "stale", "poisoned", "dead"]


class Fleet(Protocol):
    """The steps of an update. Each returns one verdict for each engine it was given."""

    def lock(self) -> None: ...

    def preflight(self, engines: Sequence[str]) -> Verdicts: ...

    def transfer(self, engines: Sequence[str]) -> Verdicts:
        """Bring the files of a disk delivery to the engines' hosts."""
        ...

    def pause(self, engines: Sequence[str]) -> Verdicts: ...

    def flush(self, engines: Sequence[str]) -> Verdicts: ...

    def begin(self, engines: Sequence[str]) -> Verdicts: ...

    def bucket(self, label: str, engines: Sequence[str]) -> Verdicts: ...

    def retry(self, label: str, engine: str) -> Verdict: ...

    def barrier(self) -> None: ...

    def abort(self, engines: Sequence[str]) -> Verdicts: ...

    def rebuild(self, engines: Sequence[str]) -> Verdicts: ...

    def load(self, engines: Sequence[str]) -> Verdicts:
        """Load the files of a disk delivery."""
        ...

    def commit(self, engines: Sequence[str]) -> Verdicts: ...

    def describe(self, engine: str) -> bool:
        """Whether an engine whose commit answer was lost holds the target version with this manifest."""
        ...

    def resume(self, engines: Sequence[str]) -> Verdicts: ...

    def unlock(self) -> None: ...


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """One update. Bucket labels start with `n` (non-expert) or `x` (expert)."""

    delivery: Delivery
    version: int | None
    target: int
    engines: tuple[str, ...]
    buckets: tuple[str, ...]
    flush: bool = True


@dataclass(frozen=True, slots=True)
class EngineFate:
    """Where an engine stands after the update. `version` None: not known to be whole."""

    state: FinalState
    version: int | None
    phase: str = ""

    @property
    def in_router(self) -> bool:
        """Whether it may receive requests."""
        return self.state == "serving"


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """`ok`: every engine holds the target; `partial`: some do; `failed`: none. `actions` are the steps in order."""

    outcome: Literal["ok", "partial", "failed"]
    actions: tuple[str, ...]
    engines: Mapping[str, EngineFate]


def run_update(fleet: Fleet, plan: UpdatePlan, on_action: Callable[[str], None] | None = None) -> UpdateOutcome:
    """Run one update and say what became of each engine. The lock is given back whatever happens.

    `on_action` hears of each step as it starts.
    """
    run = _Run(fleet, plan, on_action)
    run.note("lock")
    fleet.lock()
    try:
        run.execute()
    finally:
        run.note("unlock")
        fleet.unlock()
    return run.outcome()


@dataclass(slots=True)
class _Run:
    """One update in progress. `live` are the engines still taking part."""

    fleet: Fleet
    plan: UpdatePlan
    on_action: Callable[[str], None] | None = None
    actions: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    fates: dict[str, EngineFate] = field(default_factory=dict)

    def note(self, action: str) -> None:
        self.actions.append(action)
        if self.on_action is not None:
            self.on_action(action)

    def execute(self) -> None:
        self.live = list(self.plan.engines)
        self.note("preflight")
        verdicts = self.fleet.preflight(tuple(self.live))
        if "incompatible" in verdicts.values():
            self._keep_all(verdicts)
            return
        self._settle("preflight", verdicts)
        if not self.live or not self._transferred() or not self._opened():
            return
        delivered = self._load() if self.plan.delivery == "disk-delta" else self._deliver()
        if delivered and self._commit():
            self._step("resume", self.fleet.resume)

    def _keep_all(self, verdicts: Verdicts) -> None:
        for engine in self.live:
            unreachable = verdicts.get(engine) == "unreachable"
            self.fates[engine] = EngineFate("stale", None) if unreachable else EngineFate("serving", self.plan.version)
        self.live = []

    def _transferred(self) -> bool:
        return self.plan.delivery != "disk-delta" or self._step("transfer", self.fleet.transfer)

    def _opened(self) -> bool:
        if not self._step("pause", self.fleet.pause):
            return False
        if self.plan.flush and not self._step("flush", self.fleet.flush):
            return False
        return self._step("begin", self.fleet.begin)

    def _load(self) -> bool:
        return self._step("load", self.fleet.load)

    def _deliver(self) -> bool:
        """Send every bucket; a broadcast that loses a member starts again without it."""
        while not self._send_buckets():
            if not self.live:
                return False
            self.note("abort")
            self.fleet.abort(tuple(self.live))
            if not self._step("rebuild", self.fleet.rebuild) or not self._step("begin", self.fleet.begin):
                return False
        return bool(self.live)

    def _send_buckets(self) -> bool:
        """Send buckets in order. False when nobody is left, or a broadcast lost a member."""
        previous = ""
        for label in self.plan.buckets:
            if previous.startswith("n") and label.startswith("x"):
                self.note("barrier")
                self.fleet.barrier()
            previous = label
            self.note(f"bucket {label}")
            verdicts = dict(self.fleet.bucket(label, tuple(self.live)))
            broken = "died" in verdicts.values() and self.plan.delivery == "broadcast"
            if not broken:
                self._retry_corrupt(label, verdicts)
            self._settle(f"bucket {label}", {e: v for e, v in verdicts.items() if not (broken and v == "corrupt")})
            if not self.live or broken:
                return False
        return True

    def _retry_corrupt(self, label: str, verdicts: dict[str, Verdict]) -> None:
        for engine in [engine for engine, verdict in verdicts.items() if verdict == "corrupt"]:
            self.note(f"retry {label} {engine}")
            verdict = self.fleet.retry(label, engine)
            verdicts[engine] = "refused" if verdict == "corrupt" else verdict

    def _commit(self) -> bool:
        self.note("commit")
        verdicts = dict(self.fleet.commit(tuple(self.live)))
        for engine in [engine for engine, verdict in verdicts.items() if verdict == "lost"]:
            self.note(f"describe {engine}")
            verdicts[engine] = "ok" if self.fleet.describe(engine) else "refused"
        self._settle("commit", verdicts)
        return bool(self.live)

    def _step(self, name: str, act: _Act) -> bool:
        """Take one step with the engines still taking part; False when none is left."""
        self.note(name)
        self._settle(name, act(tuple(self.live)))
        return bool(self.live)

    def _settle(self, phase: str, verdicts: Verdicts) -> None:
        for engine, verdict in verdicts.items():
            if verdict != "ok":
                self.fates[engine] = self._fate(verdict, phase)
        self.live = [engine for engine in self.live if engine not in self.fates]

    def _fate(self, verdict: Verdict, phase: str) -> EngineFate:
        if verdict == "unreachable":
            return EngineFate("stale", None, phase)
        if verdict == "kept":
            return EngineFate("stale", self.plan.version, phase)
        if verdict == "died":
            return EngineFate("dead", None, phase)
        return EngineFate("poisoned", None, phase)

    def outcome(self) -> UpdateOutcome:
        done = {engine: EngineFate("serving", self.plan.target) for engine in self.live}
        engines = {engine: self.fates.get(engine) or done[engine] for engine in self.plan.engines}
        kind: Literal["ok", "partial", "failed"] = "failed"
        if done:
            kind = "ok" if len(done) == len(engines) else "partial"
        return UpdateOutcome(kind, tuple(self.actions), engines)


class _Act(Protocol):
    def __call__(self, engines: Sequence[str], /) -> Verdicts: ...


def labels_of(phases: Iterable[str]) -> tuple[str, ...]:
    """Bucket labels from their phases, in order: n0, n1, …, x0, …"""
    counts = {"n": 0, "x": 0}
    labels = []
    for phase in phases:
        letter = "x" if phase == "expert" else "n"
        labels.append(f"{letter}{counts[letter]}")
        counts[letter] += 1
    return tuple(labels)
