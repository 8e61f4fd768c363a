"""Linear sessions without HTTP: what a request continues, what it changes, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_tito import (
    ChatTurn,
    EngineReplyError,
    Family,
    GenerateRequest,
    HistoryError,
    MoeInfo,
    Plan,
    RequestError,
    SamplingParams,
    Session,
    Tokenizer,
    TruncatedTurnError,
    load_family,
    matcher_named,
    verify_records,
)
from miles_tito.assemble import session_batch, session_mismatches
from miles_tito.messages import normalize_messages
from miles_tito.testing import StubEngine, StubReply, stub_routes

MOE = MoeInfo((1, 3), 300, 2)
SPECIAL = ("<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
Messages = list[dict[str, Any]]


class Driver:
    """Plays turns of a session against a stub engine, without HTTP."""

    def __init__(
        self, family: Family, matcher: str = "strict", *, close: bool = False, moe: MoeInfo | None = None
    ) -> None:
        self.family = family
        self.session = Session("s", family, matcher_named(matcher), close_truncated=close)
        self.session.moe = moe
        self.engine = StubEngine(stop_id=family.stop_ids[0], moe=moe)
        self.messages: Messages = []

    def plan(self, messages: Sequence[dict[str, Any]], tools: Any = None, **sampling: Any) -> Plan:
        return self.session.plan(ChatTurn(normalize_messages(messages), tools, {}, SamplingParams(**sampling)))

    async def turn(self, messages: Messages, text: str | None = None, finish: str = "stop", **options: Any) -> None:
        plan = self.plan(messages, **options)
        if text is not None:
            ids = self.family.tokenizer.encode(text)
            self.engine.script = [StubReply(ids, finish)]  # type: ignore[arg-type]
        request = GenerateRequest(
            "r",
            "s",
            self.session.input_ids(plan),
            SamplingParams(),
            want_experts=self.session.moe is not None,
            expert_row_start=plan.expert_row_start,
        )
        reply = await self.engine.generate(request)
        message = self.family.parse(reply.output_ids).message(lambda index: f"call_{index}")
        self.session.commit(plan, reply, message, started_s=0.0, ended_s=1.0)
        self.messages = [*messages, message]

    async def say(self, text: str, answer: str | None = None, **options: Any) -> None:
        await self.turn([*self.messages, {"role": "user", "content": text}], answer, **options)


@pytest.fixture
def driver(smollm2: Family) -> Driver:
    return Driver(smollm2)


async def test_the_next_prompt_begins_with_the_stored_ids(driver: Driver) -> None:
    await driver.say("a", "x<|im_end|>")
    stored = driver.session.ids.view().tolist()
    await driver.say("b", "y<|im_end|>")
    assert list(driver.engine.requests[1].input_ids)[: len(stored)] == stored
    text = driver.family.tokenizer.decode(driver.session.ids.view().tolist())
    assert text == driver.family.render(driver.messages, add_generation_prompt=False).rstrip("\n")


async def test_a_retry_replaces_the_last_turn_only_at_commit(driver: Driver) -> None:
    await driver.say("a", "x<|im_end|>")
    before = driver.session.ids.view().tolist()
    plan = driver.plan([{"role": "user", "content": "a"}])
    assert plan.keep_turns == 0
    assert driver.session.ids.view().tolist() == before
    assert len(driver.session.turns) == 1
    await driver.turn([{"role": "user", "content": "a"}], "z<|im_end|>")
    assert len(driver.session.turns) == 1
    assert driver.session.messages[-1]["content"] == "z"
    assert driver.session.rolled_back == 1


async def test_rollback_rollback_continue(driver: Driver) -> None:
    await driver.say("a", "x<|im_end|>")
    base = driver.messages
    for answer in ("y<|im_end|>", "z<|im_end|>", "w<|im_end|>"):
        await driver.turn([*base, {"role": "user", "content": "b"}], answer)
        assert len(driver.session.turns) == 2
    await driver.say("c", "v<|im_end|>")
    (trajectory,) = session_batch(driver.session).trajectories
    verify_records(trajectory)
    assert [m["content"] for m in trajectory.messages] == ["a", "x", "b", "w", "c", "v"]
    assert driver.session.rolled_back == 2


async def test_two_turns_back_is_refused_and_changes_nothing(driver: Driver) -> None:
    await driver.say("a", "x<|im_end|>")
    await driver.say("b", "y<|im_end|>")
    with pytest.raises(HistoryError, match="stored has 4 messages, request has 1") as caught:
        driver.plan([{"role": "user", "content": "other"}])
    assert caught.value.code == "rollback_too_deep"
    assert len(driver.session.turns) == 2


async def test_a_rewritten_generated_message_is_named(qwen3: Family) -> None:
    driver = Driver(qwen3)
    await driver.say("a", "<think>\nr\n</think>\n\nx<|im_end|>")
    dropped = [driver.messages[0], {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
    with pytest.raises(HistoryError, match=r"reasoning_content.*role_content_only would accept") as caught:
        driver.plan(dropped)
    assert (caught.value.code, caught.value.message_index, caught.value.field) == (
        "history_rewritten",
        1,
        "reasoning_content",
    )
    loose = Driver(qwen3, "role_content_only")
    await loose.say("a", "<think>\nr\n</think>\n\nx<|im_end|>")
    plan = loose.plan(dropped)
    assert plan.messages[1]["reasoning_content"] == "r"


async def test_an_injected_assistant_is_history_with_loss_0(qwen3: Family) -> None:
    driver = Driver(qwen3)
    await driver.say("a", "<think>\n\n</think>\n\nx<|im_end|>")
    injected = [*driver.messages, {"role": "assistant", "content": "note"}, {"role": "user", "content": "go"}]
    await driver.turn(injected, "<think>\n\n</think>\n\ny<|im_end|>")
    (trajectory,) = session_batch(driver.session).trajectories
    text = qwen3.tokenizer.decode(trajectory.token_ids[trajectory.loss_mask == 0].tolist())
    assert "note" in text
    # One rollback across the injected assistant, back to the first turn.
    assert driver.plan([*injected[:2], {"role": "user", "content": "else"}]).keep_turns == 1


async def test_a_truncated_turn_is_not_extended_unless_closed(smollm2: Family) -> None:
    refusing, closing = Driver(smollm2), Driver(smollm2, close=True)
    for driver in (refusing, closing):
        await driver.say("a", "half", finish="length")
    with pytest.raises(TruncatedTurnError, match="on_truncation"):
        await refusing.say("go on")
    assert refusing.plan([{"role": "user", "content": "a"}]).keep_turns == 0
    await closing.say("go on", "rest<|im_end|>")
    (trajectory,) = session_batch(closing.session).trajectories
    verify_records(trajectory)
    text = smollm2.tokenizer.decode(trajectory.token_ids.tolist())
    assert "half<|im_end|>\n<|im_start|>user\ngo on" in text
    end = smollm2.stop_ids[0]
    first_stop = trajectory.turns[0].end
    assert (trajectory.token_ids[first_stop], trajectory.loss_mask[first_stop]) == (end, 0)


async def test_open_reasoning_is_closed_too(qwen3: Family) -> None:
    driver = Driver(qwen3, close=True)
    await driver.say("a", "<think>\nhalf", finish="length")
    await driver.say("go on", "<think>\n\n</think>\n\nx<|im_end|>")
    text = qwen3.tokenizer.decode(driver.session.ids.view().tolist())
    assert "<think>\nhalf\n</think>\n\n<|im_end|>\n<|im_start|>user" in text


@pytest.mark.parametrize("text", ["", "ends with a stop string"])
async def test_a_turn_without_stop_id_counts_as_cut(driver: Driver, text: str) -> None:
    await driver.say("a", text)
    assert driver.session.status == "truncated"
    with pytest.raises(TruncatedTurnError):
        driver.plan([*driver.messages, {"role": "user", "content": "b"}])


@pytest.mark.parametrize("answer", ["<|im_end|>", "x<|im_end|><|im_end|>", "x<|im_start|>user\ny<|im_end|>"])
async def test_odd_samples_survive_bit_for_bit(driver: Driver, answer: str) -> None:
    await driver.say("a", answer)
    await driver.say("b", "y<|im_end|>")
    assert (answer + "\n<|im_start|>user\nb") in driver.family.tokenizer.decode(driver.session.ids.view().tolist())


async def test_tools_and_temperature_belong_to_the_lineage(qwen3: Family) -> None:
    driver = Driver(qwen3)
    await driver.say("a", "<think>\n\n</think>\n\nx<|im_end|>", tools=None)
    more = [*driver.messages, {"role": "user", "content": "b"}]
    for options, code in (
        ({"tools": ({"name": "f"},)}, "tools_changed"),
        ({"temperature": 0.5}, "temperature_changed"),
    ):
        with pytest.raises(RequestError) as caught:
            driver.plan(more, **options)
        assert caught.value.code == code
    driver.plan(more, temperature=0.0)


async def test_an_exact_resend_generates_again(driver: Driver) -> None:
    await driver.say("a", "x<|im_end|>")
    await driver.turn(driver.messages, "y<|im_end|>")
    assert [m["content"] for m in driver.session.messages] == ["a", "x", "y"]
    assert len(driver.session.turns) == 2


async def test_expert_rows_are_those_of_the_first_pass(smollm2: Family) -> None:
    driver = Driver(smollm2, moe=MOE)
    await driver.say("a", "xy<|im_end|>")
    await driver.say("b", "z<|im_end|>")
    driver.engine.version = 4
    await driver.turn([*driver.messages[:2], {"role": "user", "content": "c"}], "w<|im_end|>")
    starts = [request.expert_row_start for request in driver.engine.requests]
    first_end = driver.session.turns[0].turn.end
    assert starts == [0, first_end - 1, first_end - 1]
    (trajectory,) = session_batch(driver.session).trajectories
    verify_records(trajectory)
    experts = trajectory.routed_experts
    assert experts is not None
    assert experts.rows.dtype == np.uint16
    assert (experts.rows == stub_routes(trajectory.token_ids[:-1].astype(np.int64), MOE)).all()
    assert experts.version_spans == ((0, 0), (first_end - 1, 4))
    assert experts.missing_spans == ()


async def test_missing_or_misplaced_expert_rows_are_refused(smollm2: Family) -> None:
    driver = Driver(smollm2, moe=MOE)
    driver.engine.moe = None
    with pytest.raises(EngineReplyError, match="no routed experts"):
        await driver.say("a", "x<|im_end|>")
    driver.engine.moe = MoeInfo((1,), 300, 2)
    with pytest.raises(EngineReplyError, match="sent expert rows"):
        await driver.say("a", "x<|im_end|>")
    driver.engine.moe = MoeInfo((1, 3), 5000, 2)
    driver.session.moe = MoeInfo((1, 3), 3, 2)
    with pytest.raises(EngineReplyError, match="named expert"):
        await driver.say("a", "x<|im_end|>")
    assert driver.session.turns == []


@pytest.mark.parametrize("moe", [None, MOE])
async def test_samples_are_cut_at_a_length_and_stay_verifiable(smollm2: Family, moe: MoeInfo | None) -> None:
    driver = Driver(smollm2, moe=moe)
    await driver.say("a", "wxyz<|im_end|>")
    await driver.say("b", "wxyz<|im_end|>")
    first, second = (committed.turn for committed in driver.session.turns)
    whole = session_batch(driver.session, max_seq_len=second.end).trajectories[0]
    assert (whole.status, len(whole.turns)) == ("completed", 2)
    for limit in range(1, second.end):
        batch = session_batch(driver.session, max_seq_len=limit)
        if limit <= first.prompt_length:
            assert batch.trajectories == ()
            assert batch.empty_reason == "all_truncated"
            continue
        (cut,) = batch.trajectories
        verify_records(cut)
        assert cut.status == "truncated"
        assert cut.n_tokens <= limit
        assert cut.loss_mask[-1] == 1
    assert session_batch(Session("e", smollm2, matcher_named("strict"))).empty_reason == "no_records"


class Counting(Tokenizer):
    """Counts what it is asked to encode."""

    encoded = 0

    def encode(self, text: str, *, literal: bool = False) -> list[int]:
        ids = super().encode(text, literal=literal)
        self.encoded += len(ids)
        return ids


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
async def test_a_trajectory_is_encoded_once(name: str) -> None:
    counting = Counting.byte_level(SPECIAL, MARKERS)
    driver = Driver(load_family(name, counting))
    counting.encoded = 0
    for turn in range(40):
        await driver.say(f"question {turn} with some words")
        session_batch(driver.session)
    encoded, length = counting.encoded, len(driver.session.ids)
    assert encoded <= 1.05 * length, (encoded, length)


class LinearSession(RuleBasedStateMachine):
    """Random turns, retries and refusals: the buffer is always what its records say.

    It re-renders without a hard mismatch, too.
    """

    def __init__(self) -> None:
        super().__init__()
        tokenizer = Tokenizer.byte_level(SPECIAL, MARKERS)
        self.driver = Driver(load_family("qwen3", tokenizer), moe=MOE)

    def play(self, messages: Messages) -> None:
        asyncio.run(self.driver.turn(messages))

    @rule(
        text=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        role=st.sampled_from(["user", "tool", "system"]),
    )
    def extend(self, text: str, role: str) -> None:
        self.play([*self.driver.messages, {"role": role, "content": text.replace("<", "")}])

    @precondition(lambda self: len(self.driver.session.turns) > 0)
    @rule()
    def retry(self) -> None:
        keep = self.driver.session.turns[-1].n_messages - 1
        self.play(list(self.driver.messages[:keep]))

    @precondition(lambda self: len(self.driver.session.turns) > 2)
    @rule()
    def refuse(self) -> None:
        before = self.driver.session.ids.view().tolist()
        with pytest.raises(HistoryError):
            self.driver.plan([{"role": "user", "content": "unrelated"}])
        assert self.driver.session.ids.view().tolist() == before

    @invariant()
    def records_hold(self) -> None:
        for trajectory in session_batch(self.driver.session).trajectories:
            verify_records(trajectory)
        assert not [mismatch for mismatch in session_mismatches(self.driver.session) if mismatch.hard]


LinearSession.TestCase.settings = settings(max_examples=25, stateful_step_count=8, deadline=None)
TestLinearSession = LinearSession.TestCase
