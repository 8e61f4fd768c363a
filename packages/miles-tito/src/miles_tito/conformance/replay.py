"""A golden splice, played through a session: commit the sample, append the messages, look at the next prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_tito.assemble import session_batch
from miles_tito.families import Family
from miles_tito.matching import strict
from miles_tito.messages import normalize_messages
from miles_tito.protocols import FinishReason, GenerateReply, SamplingParams
from miles_tito.records import record_digest
from miles_tito.session import ChatTurn, Plan, Session

from .found import Case


@dataclass(frozen=True, slots=True)
class Spliced:
    """Ids of the first prompt and of the next one, and the loss mask over the latter."""

    prompt_ids: list[int]
    next_ids: list[int]
    loss_mask: list[int]


def spliced_ids(family: Family, case: Case, sampled_ids: Sequence[int]) -> Spliced:
    """Commit `sampled_ids` as the last of `old_messages`, then `appended_messages` with an empty answer."""
    session = Session("golden", family, strict)
    old, appended = normalize_messages(case["old_messages"]), normalize_messages(case["appended_messages"])
    tools = tuple(case["tools"]) if case["tools"] else None
    kwargs = {**case["family_kwargs"], **case["kwargs"]}
    first = session.plan(ChatTurn(old[:-1], tools, kwargs, SamplingParams()))
    prompt_ids = session.input_ids(first)
    session.commit(first, _reply(session, first, sampled_ids), old[-1], started_s=0.0, ended_s=0.0)
    following = session.plan(ChatTurn((*old, *appended), tools, kwargs, SamplingParams()))
    next_ids = session.input_ids(following)
    session.commit(following, _reply(session, following, ()), {"role": "assistant"}, started_s=0.0, ended_s=0.0)
    (trajectory,) = session_batch(session, compare=False).trajectories
    return Spliced(prompt_ids, next_ids, trajectory.loss_mask.tolist())


def _reply(session: Session, plan: Plan, output_ids: Sequence[int]) -> GenerateReply:
    logprobs = np.full(len(output_ids), -1.0, np.float32)
    spans = ((0, 0),) if output_ids else ()
    inputs = session.input_ids(plan)
    return GenerateReply(
        request_id="golden",
        engine_id="golden:0",
        output_ids=tuple(output_ids),
        logprobs=logprobs,
        version_spans=spans,
        finish=FinishReason("stop" if output_ids else "abort"),
        prompt_tokens=len(inputs),
        cached_tokens=0,
        record_digest=record_digest(inputs, output_ids, logprobs, spans),
    )
