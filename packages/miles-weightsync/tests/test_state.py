"""What can never happen to an engine's state, whatever order calls come in."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_weightsync import ReceiverState, Session, SessionError

TOKENS = st.integers(1, 4)
NAMES = st.sampled_from(["s1", "s2"])
INDICES = st.integers(-1, 3)


class AnyOrder(RuleBasedStateMachine):
    """Random calls; `dirty` is our own account of whether a half-installed version may be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReceiverState(6)
        self.dirty = False
        self.highest = 0

    def call(self, act: Any) -> str:
        before = self.state.describe()
        try:
            return str(act() or "ok")
        except SessionError as error:
            after = self.state.describe()
            if error.code in ("fenced", "no_session", "order", "conflict", "incomplete", "session_open", "needs_full"):
                assert after == before, "a refused call changes nothing"
            return f"error:{error.code}"

    @rule()
    def pause(self) -> None:
        self.call(self.state.pause)

    @rule()
    def resume(self) -> None:
        self.call(self.state.resume)

    @rule(token=TOKENS, name=NAMES, full=st.booleans())
    def begin(self, token: int, name: str, full: bool) -> None:
        if self.call(lambda: self.state.begin(Session(name, token, 7, 2, full))) == "ok":
            assert token >= self.highest
            self.highest = token

    @rule(token=TOKENS, name=NAMES, index=INDICES, digest=st.sampled_from(["d1", "d2"]), fault=st.sampled_from("ccnl"))
    def bucket(self, token: int, name: str, index: int, digest: str, fault: str) -> None:
        if self.call(lambda: self.state.admit_bucket(token, name, index, digest)) != "apply":
            return
        assert token >= self.highest
        if fault == "c":
            self.call(lambda: self.state.bucket_applied(digest))
            self.dirty = True
        elif fault == "n":
            self.state.bucket_corrupt(index)
        else:
            self.state.load_failed("no")
            self.dirty = True

    @rule(token=TOKENS, name=NAMES, version=st.sampled_from([7, 8]), good=st.booleans())
    def commit(self, token: int, name: str, version: int, good: bool) -> None:
        if self.call(lambda: self.state.admit_commit(token, name, version, "m")) != "apply":
            return
        if self.call(lambda: self.state.commit("m", "m" if good else "other")) == "ok":
            self.dirty = False

    @rule(token=TOKENS, name=NAMES)
    def abort(self, token: int, name: str) -> None:
        self.call(lambda: self.state.abort(token, name))

    @rule()
    def timeout(self) -> None:
        self.state.timeout()

    @precondition(lambda self: self.dirty)
    @invariant()
    def never_serves_a_half_installed_version(self) -> None:
        assert not self.state.describe().routable

    @invariant()
    def a_version_is_claimed_only_when_whole(self) -> None:
        view = self.state.describe()
        if view.state in ("serving", "paused"):
            assert view.version in (6, 7)
            assert not self.dirty
        if view.state == "poisoned":
            assert view.version is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30)
