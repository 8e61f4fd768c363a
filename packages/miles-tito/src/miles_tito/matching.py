"""When is a replayed message the stored one? Only role, content, reasoning_content and tool_calls count."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from .errors import ConfigurationError

Message = Mapping[str, Any]
Matcher = Callable[[Message, Message], bool]
KEYS = ("role", "content", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field in which two messages differ, and its first differing characters."""

    field: str
    stored: str
    replayed: str
    accepted_by: str | None
    """Name of a matcher that takes the two for the same, if there is one."""


def strict(stored: Message, replayed: Message) -> bool:
    """Python equality of the four keys; None, "" and [] are one value, `tool_calls[].index` is ignored."""
    return all(_value(stored, key) == _value(replayed, key) for key in KEYS)


def loose_tool_call(stored: Message, replayed: Message) -> bool:
    """`strict`, but tool-call arguments compare as JSON objects: spelling, key order and number spelling do not
    matter."""
    if strict(stored, replayed):
        return True
    if any(_value(stored, key) != _value(replayed, key) for key in KEYS[:3]):
        return False
    ours, theirs = _value(stored, "tool_calls"), _value(replayed, "tool_calls")
    if not isinstance(ours, list) or not isinstance(theirs, list) or len(ours) != len(theirs):
        return False
    return all(_same_call(one, other) for one, other in zip(ours, theirs, strict=True))


def role_content_only(stored: Message, replayed: Message) -> bool:
    """Role and content only. High risk: dropped reasoning and changed calls pass unseen."""
    return all(_value(stored, key) == _value(replayed, key) for key in KEYS[:2])


MATCHERS: dict[str, Matcher] = {
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def matcher_named(name: str) -> Matcher:
    """The matcher called `name`. Raises `ConfigurationError` with the names there are."""
    if name not in MATCHERS:
        raise ConfigurationError(f"no message matcher {name!r}: choose one of {', '.join(MATCHERS)}")
    return MATCHERS[name]


def first_difference(stored: Message, replayed: Message) -> Difference:
    """What to tell a client whose replayed message is not the stored one."""
    field = next((key for key in KEYS if _value(stored, key) != _value(replayed, key)), "role")
    ours, theirs = _text(_value(stored, field)), _text(_value(replayed, field))
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    window = slice(max(0, at - 12), at + 28)
    accepted = next((name for name, matcher in MATCHERS.items() if matcher(stored, replayed)), None)
    return Difference(field, ours[window], theirs[window], accepted)


def _value(message: Message, key: str) -> Any:
    value = message.get(key)
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return None
    if key == "tool_calls" and isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_index(call) for call in value]
    return value


def _without_index(call: Any) -> Any:
    return {key: value for key, value in call.items() if key != "index"} if isinstance(call, Mapping) else call


def _same_call(one: Any, other: Any) -> bool:
    """Two calls with the same keys whose arguments are the same object and whose other values are equal."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)) or one.keys() != other.keys():
        return bool(one == other)
    return all(_same_function(one[key], other[key]) if key == "function" else one[key] == other[key] for key in one)


def _same_function(one: Any, other: Any) -> bool:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)) or one.keys() != other.keys():
        return bool(one == other)
    return all(_same_arguments(one[key], other[key]) if key == "arguments" else one[key] == other[key] for key in one)


def _same_arguments(one: Any, other: Any) -> bool:
    try:
        return bool(_canonical(_parse_object(one)) == _canonical(_parse_object(other)))
    except (ValueError, RecursionError, InvalidOperation):
        return type(one) is type(other) and bool(one == other)


def _parse_object(arguments: Any) -> dict[str, Any]:
    """Arguments as an object whose numbers are exact. Raises `ValueError` for anything else."""
    if arguments is None or arguments == "":
        return {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
    value = json.loads(
        text, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse, object_pairs_hook=_without_duplicates
    )
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _canonical(value: Any) -> Any:
    """A form in which equality is JSON equality: types apart, object keys unordered, numbers by exact value."""
    if isinstance(value, dict):
        return ("object", {key: _canonical(item) for key, item in value.items()})
    if isinstance(value, list):
        return ("array", [_canonical(item) for item in value])
    return (type(value).__name__, value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
