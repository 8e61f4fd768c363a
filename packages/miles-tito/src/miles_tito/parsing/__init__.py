"""From sampled ids to an assistant message. Parsers look for token ids, so text that merely looks like a marker stays
text."""

from .assistant import ParsedTurn, plain_turn
from .reasoning import Reasoning, split_reasoning
from .tool_calls import ToolCall, parse_json_calls

__all__ = ["ParsedTurn", "Reasoning", "ToolCall", "parse_json_calls", "plain_turn", "split_reasoning"]
