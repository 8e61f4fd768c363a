"""Any checkpoint, by its own chat template. Nothing is known of it, so everything is checked: a template that
rewrites history is refused at the turn where it does so, with the first differing characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_tito.errors import ConfigurationError, HistoryError
from miles_tito.messages import Message, call_arguments
from miles_tito.parsing import ParsedTurn, plain_turn
from miles_tito.render import ChatTemplate
from miles_tito.tokenizer import Tokenizer

from .base import Family, FamilyOptions, Kwargs, Tools

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continuation"})


class Default(Family):
    """The checkpoint's template, its end-of-turn token as stop, and the difference of two renderings as suffix."""

    name = "default"

    def __init__(self, tokenizer: Tokenizer, options: FamilyOptions | None = None) -> None:
        options = options or FamilyOptions()
        if not tokenizer.chat_template:
            raise ConfigurationError("family default needs a checkpoint with a chat template, and this one has none")
        if not tokenizer.eos_tokens:
            raise ConfigurationError("family default needs eos_token in tokenizer_config.json to know where turns end")
        if options.default_system:
            raise ConfigurationError("family default takes its system turn from the checkpoint's template")
        template = ChatTemplate(tokenizer.chat_template, name="of the checkpoint", strict=False, limits=options.limits)
        roles = frozenset({"tool", "user", "system", "assistant"})
        super().__init__(tokenizer, template, roles, options)
        self.stop_ids = tuple(tokenizer.token_id(text) for text in tokenizer.eos_tokens)

    def merge_kwargs(self, kwargs: Kwargs) -> dict[str, Any]:
        taken = sorted(_RESERVED & kwargs.keys())
        if taken:
            raise HistoryError(f"chat_template_kwargs cannot set {', '.join(taken)}", code="unknown_template_kwarg")
        specials = {"eos_token": self.tokenizer.eos_tokens[0], "bos_token": self.tokenizer.bos_token or ""}
        return {**specials, **kwargs}

    def template_messages(self, messages: Sequence[Message], first_index: int = 0) -> list[dict[str, Any]]:
        prepared = super().template_messages(messages, first_index)
        for index, message in enumerate(prepared, first_index):
            if message.get("tool_calls"):
                message["tool_calls"] = [_object_call(call, index) for call in message["tool_calls"]]
        return prepared

    def suffix_text(self, stored: Sequence[Message], appended: Sequence[Message], tools: Tools, kwargs: Kwargs) -> str:
        old = self.render(stored, tools, kwargs, add_generation_prompt=False)
        new = self.render([*stored, *appended], tools, kwargs, add_generation_prompt=True)
        if new.startswith(old):
            return new[len(old) :]
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        window = slice(max(0, at - 20), at + 40)
        raise HistoryError(
            f"the checkpoint's chat template rewrites history when messages follow message {len(stored) - 1}: at "
            f"character {at} it "
            f"had {old[window]!r} and now writes {new[window]!r}; use a family whose template keeps history",
            code="not_append_only",
            message_index=len(stored) - 1,
        )

    def boundary_ids(self, last_id: int, stored: Sequence[Message], tools: Tools, kwargs: Kwargs) -> tuple[int, ...]:
        """Whitespace that the template writes after the stop token at the end of `stored`."""
        text = self.render(stored, tools, kwargs, add_generation_prompt=False)
        stop = self.tokenizer.token(last_id) if self.is_closed(last_id) else None
        if stop is None or stop not in text:
            return ()
        tail = text[text.rindex(stop) + len(stop) :]
        return () if tail.strip() else tuple(self.tokenizer.encode(tail))

    def close_ids(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        return (self.stop_ids[0],)

    def parse(self, sampled_ids: Sequence[int]) -> ParsedTurn:
        return plain_turn(self.tokenizer.decode(self.without_stop(sampled_ids)))


def _object_call(call: Message, index: int) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates of checkpoints expect."""
    return {**call, "function": {**call["function"], "arguments": call_arguments(call, index)}}
