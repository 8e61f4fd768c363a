"""What one sampled turn says, before it becomes an OpenAI message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .tool_calls import ToolCall

CallIds = Callable[[int], str]
"""From the index of a call within its turn to its id."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Content, reasoning and calls of a turn; `raw_*` are the texts before whitespace was trimmed."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    parse_error: str | None = None
    raw_content: str | None = None
    raw_reasoning: str | None = None

    def message(self, call_ids: CallIds) -> dict[str, Any]:
        """The OpenAI assistant message. Fields that begin with `x_` are ours and say what the standard ones cannot."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.openai(call_ids(index)) for index, call in enumerate(self.calls)]
        extras = {
            "x_tool_parse_error": self.parse_error,
            "x_raw_content": _unless(self.raw_content, self.content),
            "x_raw_reasoning": _unless(self.raw_reasoning, self.reasoning),
        }
        return message | {name: value for name, value in extras.items() if value is not None}


def plain_turn(text: str) -> ParsedTurn:
    """A turn of a family without reasoning and tools: the text is the content."""
    return ParsedTurn(text)


def _unless(raw: str | None, parsed: str | None) -> str | None:
    return None if raw is None or raw == parsed else raw
