"""SmolLM2 and other plain ChatML models: system, user and assistant turns; tool results travel as user turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_tito.errors import RequestError
from miles_tito.messages import Message
from miles_tito.parsing import ParsedTurn, plain_turn
from miles_tito.tokenizer import Tokenizer

from .base import FamilyOptions, Kwargs, TemplateFamily, Tools


class SmolLM2(TemplateFamily):
    """Stop `<|im_end|>`, followed by a newline that is not sampled. A system message can only be the first."""

    name = "smollm2"
    template_name = "smollm2"
    roles = frozenset({"system", "user", "assistant"})
    roles_after_turn = frozenset({"user", "assistant"})
    takes_tools = False
    assistant_start = "<|im_start|>assistant"
    trim_texts = ("\n",)

    def __init__(self, tokenizer: Tokenizer, options: FamilyOptions | None = None) -> None:
        super().__init__(tokenizer, options)
        tokenizer.token_id("<|im_start|>")

    def merge_kwargs(self, kwargs: Kwargs) -> dict[str, Any]:
        return {**super().merge_kwargs(kwargs), "default_system": self.options.default_system or ""}

    def check(self, messages: Sequence[Message], tools: Tools) -> None:
        super().check(messages, tools)
        for index, message in enumerate(messages[1:], 1):
            if message["role"] == "system":
                raise RequestError(
                    f"message {index} is a system message; family {self.name} has one only at the start",
                    code="system_not_first",
                    message_index=index,
                    field="role",
                )

    def parse(self, sampled_ids: Sequence[int]) -> ParsedTurn:
        return plain_turn(self.tokenizer.decode(self.without_stop(sampled_ids)))
