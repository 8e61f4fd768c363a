"""What must hold of any engine's reply before a token of it is stored."""

from __future__ import annotations

from miles_tito.errors import EngineReplyError
from miles_tito.protocols import GenerateReply, GenerateRequest
from miles_tito.records import check_record, expert_digest, record_digest


def check_reply(request: GenerateRequest, reply: GenerateReply) -> None:
    """Raise `EngineReplyError` when a reply contradicts itself or the request, `TokenIdentityError` or
    `ExpertIdentityError` when its digest is not that of its tokens."""
    who = f"engine {reply.engine_id}, request {request.request_id}"
    n_input, n_output = len(request.input_ids), len(reply.output_ids)
    if reply.prompt_tokens != n_input:
        raise EngineReplyError(
            f"{who}: the engine consumed {reply.prompt_tokens} prompt tokens of {n_input} that were sent: it "
            "tokenised again or "
            "cut the prompt",
            code="prompt_length_mismatch",
        )
    if reply.logprobs.shape != (n_output,):
        raise EngineReplyError(f"{who}: {n_output} output ids but log-probabilities of shape {reply.logprobs.shape}")
    _check_spans(who, reply, n_output)
    expected = reply.record_digest, reply.expert_digest
    found_experts = expert_digest(reply.experts) if reply.experts is not None else None
    found = record_digest(request.input_ids, reply.output_ids, reply.logprobs, reply.version_spans, reply.experts)
    check_record(who, expected, (found, found_experts))


def _check_spans(who: str, reply: GenerateReply, n_output: int) -> None:
    starts = [start for start, _ in reply.version_spans]
    ascending = starts == sorted(set(starts)) and all(start < n_output for start in starts)
    if bool(starts) != bool(n_output) or (starts and starts[0] != 0) or not ascending:
        raise EngineReplyError(
            f"{who}: weight_version_spans {list(reply.version_spans)} do not cover {n_output} output tokens"
        )
    if any(version < 0 for _, version in reply.version_spans):
        raise EngineReplyError(f"{who}: weight_version_spans {list(reply.version_spans)} hold a negative version")
