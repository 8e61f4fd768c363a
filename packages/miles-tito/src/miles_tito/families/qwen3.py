"""Qwen3: ChatML with `<think>` blocks, tools as JSON, and a template that keeps the reasoning of earlier turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from miles_tito.messages import Message, call_arguments, text_of
from miles_tito.parsing import ParsedTurn, parse_json_calls, split_reasoning
from miles_tito.tokenizer import Tokenizer

from .base import FamilyOptions, TemplateFamily


class Qwen3(TemplateFamily):
    """Stop `<|im_end|>` (or `<|endoftext|>` where the tokenizer has it); a newline follows `<|im_end|>` that is not
    sampled."""

    name = "qwen3"
    template_name = "qwen3"
    roles_after_turn = frozenset({"tool", "user", "system", "assistant"})
    constants: ClassVar[Mapping[str, Any]] = {"clear_thinking": False}
    switches: ClassVar[Mapping[str, Any]] = {"enable_thinking": True}
    assistant_start = "<|im_start|>assistant"
    trim_texts = ("\n",)

    def __init__(self, tokenizer: Tokenizer, options: FamilyOptions | None = None) -> None:
        super().__init__(tokenizer, options)
        tokenizer.token_id("<|im_start|>")
        self._think = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
        self._call = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")
        text_end = tokenizer.encode("<|endoftext|>")
        if len(text_end) == 1:
            self.stop_ids = (self.end_id, text_end[0])
        self._close_reasoning = tuple(tokenizer.encode("\n</think>\n\n"))

    def template_messages(self, messages: Sequence[Message], first_index: int = 0) -> list[dict[str, Any]]:
        return [_template_message(message, index) for index, message in enumerate(messages, first_index)]

    def close_ids(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        split = split_reasoning(sampled_ids, *self._think, self.tokenizer.decode)
        return (*self._close_reasoning, self.end_id) if split.open else (self.end_id,)

    def parse(self, sampled_ids: Sequence[int]) -> ParsedTurn:
        decode = self.tokenizer.decode
        split = split_reasoning(self.without_stop(sampled_ids), *self._think, decode)
        parsed = parse_json_calls(split.content, *self._call, decode)
        raw_content = decode(split.content)
        if split.reasoning is None:
            return ParsedTurn(parsed.content, None, parsed.calls, parsed.error, raw_content)
        raw = decode(split.reasoning)
        content = parsed.content.lstrip("\n")
        return ParsedTurn(content, raw.strip("\n"), parsed.calls, parsed.error, raw_content, raw)


def _template_message(message: Message, index: int) -> dict[str, Any]:
    content = text_of(message.get("content"))
    if message["role"] != "assistant":
        return {"role": message["role"], "content": content}
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning, content = _inline_reasoning(content)
    calls = [
        {"name": call["function"]["name"], "arguments": call_arguments(call, index)}
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": content, "reasoning": reasoning, "calls": calls}


def _inline_reasoning(content: str) -> tuple[str, str]:
    """Reasoning and answer of a message that carries both in its content."""
    if "</think>" not in content:
        return "", content
    head = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return head, content.split("</think>")[-1].lstrip("\n")
