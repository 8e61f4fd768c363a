"""When a request has ended, and the text it shows."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from miles_rollout.local.model import Detokenize
from miles_rollout.local.requests import FinishReason
from miles_rollout.local.sequence import Sequence

_SLACK_TOKENS = 4
"""Tokens looked at beyond the bytes of a stop string: a token may hold its first bytes or be cut inside a character."""


def finish_reason(sequence: Sequence, eos_ids: AbstractSet[int], detokenize: Detokenize | None) -> FinishReason | None:
    """Return why `sequence` ends with the token just appended, or None when it goes on."""
    sampling = sequence.request.sampling
    token = int(sequence.tokens_T[-1])
    if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
        return FinishReason("stop", matched=token)
    if sampling.stop and detokenize is not None:
        matched = _matched_stop(sequence, detokenize)
        if matched is not None:
            return FinishReason("stop", matched=matched)
    return FinishReason("length") if sequence.n_output >= sampling.max_new_tokens else None


def visible_text(sequence: Sequence, finish: FinishReason, detokenize: Detokenize | None) -> str:
    """Return the text of the output, without what stopped it unless `no_stop_trim`; "" without a tokenizer."""
    if detokenize is None:
        return ""
    sampling, ids = sequence.request.sampling, sequence.output_ids
    trims = finish.type == "stop" and not sampling.no_stop_trim
    if trims and isinstance(finish.matched, int):
        ids = ids[:-1]
    text = detokenize(ids, sampling.skip_special_tokens)
    if trims and isinstance(finish.matched, str):
        text = text.partition(finish.matched)[0]
    return text


def _matched_stop(sequence: Sequence, detokenize: Detokenize) -> str | None:
    """Look for stop strings in the tail: each token shows at least one byte, so a bounded tail holds any match."""
    stops = sequence.request.sampling.stop
    window = max(len(stop.encode()) for stop in stops) + _SLACK_TOKENS
    tail = detokenize(sequence.output_ids[-window:], False)
    return next((stop for stop in stops if stop in tail), None)
