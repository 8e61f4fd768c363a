"""Chat messages as they come from clients: checked, and brought to the one form that is stored and matched.

The stored form is OpenAI's: content lists that have only text parts are joined, `reasoning` becomes
`reasoning_content`, and everything else stays as it was, unknown keys too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RequestError

ROLES = frozenset({"system", "user", "assistant", "tool"})
Message = Mapping[str, Any]


def normalize_messages(messages: object) -> tuple[dict[str, Any], ...]:
    """Return the stored form of a request's messages. Raises `RequestError` with the index and field of the first bad
    one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", code="invalid_messages", field="messages")
    return tuple(_normalize(index, message) for index, message in enumerate(messages))


def text_of(content: object) -> str:
    """Content as text: None and an empty list are empty, a list of text parts is their concatenation."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part["text"] for part in content)
    raise TypeError(f"content is {type(content).__name__}")


def call_arguments(call: Mapping[str, Any], message_index: int | None = None) -> dict[str, Any]:
    """The arguments of a tool call as an object, key order kept. None and "" are the empty object."""
    arguments = call["function"].get("arguments")
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _bad_arguments(call, message_index, f"not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise _bad_arguments(call, message_index, "not a JSON object")
    return arguments


def _bad_arguments(call: Mapping[str, Any], message_index: int | None, why: str) -> RequestError:
    name = call["function"].get("name")
    return RequestError(
        f"the arguments of a call of {name!r} in message {message_index} are {why}; send the text of a JSON object",
        code="invalid_tool_arguments",
        message_index=message_index,
        field="tool_calls.function.arguments",
    )


def _normalize(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(index, "", f"message {index} is {type(message).__name__}, not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _bad(index, "role", f"message {index} has role {role!r:.60}; known roles are {', '.join(sorted(ROLES))}")
    stored = dict(message)
    if "content" in stored:
        stored["content"] = _normalize_content(index, stored["content"])
    elif role != "assistant":
        raise _bad(index, "content", f"message {index} ({role}) has no content")
    alias = stored.pop("reasoning", None)
    stored.setdefault("reasoning_content", alias) if alias is not None else None
    _check_reasoning(index, stored)
    _check_calls(index, stored)
    return stored


def _normalize_content(index: int, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _bad(
            index, "content", f"the content of message {index} is {type(content).__name__}, not text or a list of parts"
        )
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"message {index} has a content part of type {kind!r}; this server takes text parts only",
                code="unsupported_content",
                message_index=index,
                field="content",
            )
    return text_of(content)


def _check_reasoning(index: int, message: Mapping[str, Any]) -> None:
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise _bad(
            index, "reasoning_content", f"reasoning_content of message {index} is {type(reasoning).__name__}, not text"
        )


def _check_calls(index: int, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if not calls and not isinstance(calls, str | int | Mapping):
        return
    if message["role"] != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _bad(index, "tool_calls", f"tool_calls of message {index} must be a list, on an assistant message")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad(index, "tool_calls", f"message {index} has a tool call without a function name")


def _bad(index: int, field: str, text: str) -> RequestError:
    return RequestError(text, code="invalid_messages", message_index=index, field=field)
