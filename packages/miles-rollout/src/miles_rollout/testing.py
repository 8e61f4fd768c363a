"""Fakes of what the worker talks to, and virtual time, for tests here and elsewhere.

def test_a_batch() -> None:
    async def main() -> None:
        sessions = FakeSessions()
        worker = RolloutWorker(..., sessions=sessions, agent=sessions.one_turn, grader=LabelGrader())
        async with worker:
            batch = await worker.next_batch()
    run_virtual(main())
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from miles_rollout.protocols import Grade, GradeRequest, SessionHandle, TrajectoryStatus

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Everything waits and no timer is set: in real time this would hang for ever."""


class _VirtualSelector(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("every task waits, and nothing is scheduled to wake one")
        self.now_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is ready. Not for sockets, threads or child processes."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time. Raises DeadlockError where real time would hang."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True)
class FakeTrajectory:
    """A trajectory with nothing but what the protocol asks for."""

    versions: tuple[int, ...] = (0,)
    status: TrajectoryStatus = "completed"
    n_tokens: int = 4
    reward: float | None = None
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def oldest_version(self) -> int | None:
        return min(self.versions, default=None)

    def with_reward(self, reward: float) -> FakeTrajectory:
        return replace(self, reward=reward)


class FakeCodec:
    """Fake trajectories as JSON."""

    def dumps(self, trajectory: Any) -> bytes:
        return json.dumps(asdict(trajectory), sort_keys=True).encode()

    def loads(self, data: bytes) -> FakeTrajectory:
        fields = json.loads(data)
        return FakeTrajectory(**{**fields, "versions": tuple(fields["versions"])})


@dataclass(slots=True)
class _FakeSession:
    metadata: Mapping[str, Any]
    seed: int
    versions: list[int] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    status: TrajectoryStatus = "completed"


Hook = Callable[[Mapping[str, Any]], Awaitable[None]]


async def _nothing(metadata: Mapping[str, Any]) -> None:
    return


class FakeSessions:
    """A session server in memory. `before_create` and `before_collect` may wait or raise, given the session's metadata.

    Args:
        version: the engines' version, stamped on each turn.
    """

    def __init__(
        self,
        version: Callable[[], int] = lambda: 0,
        *,
        before_create: Hook = _nothing,
        before_collect: Hook = _nothing,
    ) -> None:
        self._version = version
        self._before_create = before_create
        self._before_collect = before_collect
        self._next = 0
        self.open: dict[str, _FakeSession] = {}
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []

    async def create(self, *, seed: int, sampling: Mapping[str, Any], metadata: Mapping[str, Any]) -> SessionHandle:
        await self._before_create(metadata)
        self._next += 1
        session_id = f"s{self._next}"
        self.open[session_id] = _FakeSession(metadata, seed)
        self.created.append({"session_id": session_id, "seed": seed, "sampling": dict(sampling), **metadata})
        return SessionHandle(session_id, f"http://127.0.0.1:9/sessions/{session_id}")

    async def collect(self, session_id: str) -> Sequence[FakeTrajectory]:
        session = self.open[session_id]
        await self._before_collect(session.metadata)
        if not session.versions:
            return []
        tokens = 4 * len(session.versions)
        return [FakeTrajectory(tuple(session.versions), session.status, tokens, None, tuple(session.messages))]

    async def delete(self, session_id: str) -> None:
        del self.open[session_id]
        self.deleted.append(session_id)

    def turn(
        self,
        base_url: str,
        text: str = "hello",
        *,
        status: TrajectoryStatus = "completed",
        version: int | None = None,
    ) -> None:
        """Record one turn of the session at this URL, by default at the version of now."""
        session = self.open[base_url.rpartition("/")[2]]
        session.versions.append(self._version() if version is None else version)
        session.messages.append({"role": "assistant", "content": text})
        session.status = status

    async def one_turn(
        self, base_url: str, prompt: Any, request_kwargs: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> None:
        """The simplest agent: one turn that takes as many seconds as the prompt's metadata says in `seconds` (0)."""
        began_at = self._version()
        await asyncio.sleep(float(metadata.get("seconds", 0)))
        self.turn(base_url, version=began_at)


class LabelGrader:
    """The label is the reward."""

    async def grade(self, request: GradeRequest) -> Grade:
        return Grade(float(request.label or 0.0))


class MemoryEvents:
    """Keeps events in a list."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append(self, kind: str, **fields: Any) -> None:
        self.events.append(json.loads(json.dumps({"kind": kind, **fields})))

    def kinds(self, prompt_id: str | None = None) -> list[str]:
        """The kinds in order, of one prompt or of all events."""
        return [event["kind"] for event in self.events if prompt_id in (None, event.get("prompt_id"))]
