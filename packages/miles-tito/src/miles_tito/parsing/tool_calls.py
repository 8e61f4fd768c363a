"""Tool calls written as JSON objects between two marker ids (Qwen3, Qwen2.5, Hermes)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: `arguments` is the sampled text of the JSON object, spelling kept."""

    name: str
    arguments: str

    def openai(self, call_id: str) -> dict[str, Any]:
        """OpenAI's form of the call."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """Text before the first call and the calls; on `error` there are no calls and the content is everything."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


def parse_json_calls(
    ids: Sequence[int], opener: int, closer: int, decode: Callable[[Sequence[int]], str]
) -> ParsedCalls:
    """Parse `opener {"name": …, "arguments": {…}} closer` blocks. A block that does not parse leaves all of it in the
    content."""
    if opener not in ids:
        return ParsedCalls(decode(ids))
    first = list(ids).index(opener)
    try:
        calls = tuple(_parse_call(decode(block)) for block in _blocks(ids[first:], opener, closer))
    except (ValueError, RecursionError) as error:
        return ParsedCalls(decode(ids), error=str(error))
    return ParsedCalls(decode(ids[:first]).rstrip(), calls)


def _blocks(ids: Sequence[int], opener: int, closer: int) -> list[list[int]]:
    """Ids between each opener and the next closer."""
    blocks: list[list[int]] = []
    rest = list(ids)
    while opener in rest:
        start = rest.index(opener) + 1
        if closer not in rest[start:]:
            raise ValueError("a tool call is not closed")
        end = rest.index(closer, start)
        blocks.append(rest[start:end])
        rest = rest[end + 1 :]
    return blocks


def _parse_call(text: str) -> ToolCall:
    value = json.loads(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a tool call is not an object with a name")
    if not isinstance(value.get("arguments"), dict):
        raise ValueError(f"the arguments of {value['name']!r} are not an object")
    return ToolCall(value["name"], _member_text(text, "arguments"))


def _member_text(text: str, wanted: str) -> str:
    """The source text of the last member `wanted` of the object that `text` is known to be."""
    at = text.index("{") + 1
    found = ""
    while True:
        at = _skip(text, at, ",")
        if text[at] == "}":
            return found
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, at, ":")
        _, at = _DECODER.raw_decode(text, start)
        if key == wanted:
            found = text[start:at]


def _skip(text: str, at: int, separator: str) -> int:
    while text[at] in _SPACE or text[at] == separator:
        at += 1
    return at
