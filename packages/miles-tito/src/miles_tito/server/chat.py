"""OpenAI chat completions: from a request body to a turn, and from a turn to a reply. A field is honoured, harmless,
or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles_tito.errors import RequestError
from miles_tito.messages import normalize_messages
from miles_tito.protocols import FinishKind, GenerateReply, SamplingParams
from miles_tito.session import ChatTurn
from miles_tito.tokenizer import Tokenizer

# Fields that say nothing about tokens.
_HARMLESS = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Fields that are refused unless they ask for what happens anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (False,),
}
_HONOURED = frozenset(
    {
        "messages",
        "tools",
        "chat_template_kwargs",
        "stream",
        "stream_options",
        "logprobs",
        "max_tokens",
        "max_completion_tokens",
    }
)


def _number(lowest: float, highest: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest


def _integer(lowest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= lowest


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _stops(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


# Engine name -> (check, what is expected). OpenAI's names are mapped to these by `_OPENAI`.
SAMPLING_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_number(0.0, 100.0), "a number from 0 to 100"),
    "top_p": (_number(1e-9, 1.0), "a number above 0 and at most 1"),
    "top_k": (_integer(-1), "an integer, -1 for all"),
    "min_p": (_number(0.0, 1.0), "a number from 0 to 1"),
    "max_new_tokens": (_integer(1), "a positive integer"),
    "min_new_tokens": (_integer(0), "an integer"),
    "stop": (_stops, "a text or a list of texts"),
    "stop_token_ids": (_ids, "a list of token ids"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "frequency_penalty": (_number(-2.0, 2.0), "a number from -2 to 2"),
    "presence_penalty": (_number(-2.0, 2.0), "a number from -2 to 2"),
    "repetition_penalty": (_number(1e-9, 2.0), "a number above 0 and at most 2"),
    "sampling_seed": (_integer(0), "an integer"),
}
_OPENAI = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How the reply is to be written."""

    model: str | None
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_sampling(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checked sampling options in the engine's names. Raises `RequestError` for an unknown or impossible one."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in SAMPLING_FIELDS:
            raise RequestError(
                f"{where} has unknown sampling option {name!r}; known are {', '.join(SAMPLING_FIELDS)}",
                code="unknown_sampling_option",
                field=name,
            )
        check, expected = SAMPLING_FIELDS[name]
        value = [value] if name == "stop" and isinstance(value, str) else value
        if not check(value):
            raise RequestError(f"{where}: {name} is {value!r}, expected {expected}", code="invalid_value", field=name)
        checked[name] = tuple(value) if isinstance(value, list) else value
    return checked


def parse_chat(body: Mapping[str, Any], defaults: SamplingParams) -> tuple[ChatTurn, ChatOptions]:
    """A request body as a turn. Raises `RequestError` for a malformed field and for any field that would not be
    honoured."""
    present = {name: value for name, value in body.items() if value is not None}
    _refuse_unhonoured(present)
    sampling = parse_sampling(_sampling_of(present), "the request")
    turn = ChatTurn(
        messages=normalize_messages(present.get("messages")),
        tools=_tools(present.get("tools")),
        template_kwargs=_mapping(present, "chat_template_kwargs"),
        sampling=replace(defaults, **sampling),
    )
    options = ChatOptions(
        model=present.get("model"),
        stream=_flag(present, "stream"),
        include_usage=bool(_mapping(present, "stream_options").get("include_usage", False)),
        logprobs=_flag(present, "logprobs"),
    )
    return turn, options


def reply_body(
    reply: GenerateReply,
    message: Mapping[str, Any],
    kind: FinishKind,
    options: ChatOptions,
    tokenizer: Tokenizer,
    created_s: int,
) -> dict[str, Any]:
    """The `chat.completion` object."""
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason(kind, message)}
    choice["logprobs"] = _logprobs(reply, tokenizer) if options.logprobs else None
    return {
        "id": f"chatcmpl-{reply.request_id}",
        "object": "chat.completion",
        "created": created_s,
        "model": options.model or "miles",
        "choices": [choice],
        "usage": _usage(reply),
    }


def chunk_body(body: Mapping[str, Any], options: ChatOptions) -> dict[str, Any]:
    """A whole reply as the only `chat.completion.chunk` of a stream."""
    choice = body["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    chunk = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunk["choices"] = [
        {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    ]
    return chunk | ({"usage": body["usage"]} if options.include_usage else {})


def finish_reason(kind: FinishKind, message: Mapping[str, Any]) -> str:
    """OpenAI's reason: a cut wins over tool calls."""
    if kind != "stop":
        return kind
    return "tool_calls" if message.get("tool_calls") else "stop"


def _refuse_unhonoured(present: Mapping[str, Any]) -> None:
    for name, value in present.items():
        known = name in _HARMLESS or name in _HONOURED or name in SAMPLING_FIELDS or name in _OPENAI
        if known or (name in _NEUTRAL and any(value == neutral for neutral in _NEUTRAL[name])):
            continue
        what = f"with value {str(value)[:60]!r}" if name in _NEUTRAL else "here"
        raise RequestError(
            f"the field {name!r} is not supported {what}: leave it out", code="unsupported_field", field=name
        )


def _sampling_of(present: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in present.items() if name in SAMPLING_FIELDS}
    for openai_name, name in _OPENAI.items():
        if openai_name in present:
            values[name] = present[openai_name]
    limits = [present[name] for name in ("max_tokens", "max_completion_tokens", "max_new_tokens") if name in present]
    if any(limit != limits[0] for limit in limits):
        raise RequestError(
            f"the request names several answer lengths: {limits}", code="invalid_value", field="max_tokens"
        )
    return values | ({"max_new_tokens": limits[0]} if limits else {})


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("tools must be a list of objects", code="invalid_value", field="tools")
    return tuple(tools)


def _mapping(present: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = present.get(name, {})
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {type(value).__name__}, expected an object", code="invalid_value", field=name)
    return value


def _flag(present: Mapping[str, Any], name: str) -> bool:
    value = present.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}, expected true or false", code="invalid_value", field=name)
    return value


def _usage(reply: GenerateReply) -> dict[str, Any]:
    completion = len(reply.output_ids)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": reply.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _logprobs(reply: GenerateReply, tokenizer: Tokenizer) -> dict[str, Any]:
    entries = []
    for token, logprob in zip(reply.output_ids, reply.logprobs, strict=True):
        text = tokenizer.token(token)
        entries.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}
