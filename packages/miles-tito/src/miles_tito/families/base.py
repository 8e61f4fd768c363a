"""The contract of a chat family, and what all families share.

The rule that makes token identity possible: for messages `stored` that end with a generated assistant,
`render(stored + appended)` begins with `render(stored)`, so that the next prompt is the stored ids, plus the boundary
that the model does not sample, plus the ids of `suffix_text`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from miles_tito.errors import ConfigurationError, RequestError
from miles_tito.messages import ROLES, Message, text_of
from miles_tito.parsing import ParsedTurn
from miles_tito.render import ChatTemplate
from miles_tito.sandbox import RenderLimits
from miles_tito.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]] | None
Kwargs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """Options of a family: a system turn for conversations without one, a narrower set of appendable roles, limits."""

    default_system: str | None = None
    append_roles: frozenset[str] | None = None
    limits: RenderLimits | None = None


class Family(ABC):
    """A chat family bound to a tokenizer. Structural tokens are resolved when it is made; a missing one is an error
    then."""

    name: ClassVar[str]
    roles: ClassVar[frozenset[str]] = ROLES
    takes_tools: ClassVar[bool] = True
    max_trim: ClassVar[int] = 0
    """How many sampled ids at the end of a turn a splice may drop."""
    assistant_start: str | None = None
    """How an assistant message begins in rendered text; None when unknown."""
    trim_texts: tuple[str, ...] = ()
    """Texts that the comparator ignores at the very end."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, append_roles: frozenset[str], options: FamilyOptions
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.append_roles = _narrow(self.name, append_roles, options.append_roles)
        self.options = options

    stop_ids: tuple[int, ...]

    @abstractmethod
    def merge_kwargs(self, kwargs: Kwargs) -> dict[str, Any]:
        """Template variables of a request: the client's over the family's. Raises `RequestError` for one that is not
        honoured."""

    @abstractmethod
    def suffix_text(self, stored: Sequence[Message], appended: Sequence[Message], tools: Tools, kwargs: Kwargs) -> str:
        """Text of `appended` after `stored`, which ends with an assistant, and the generation prompt."""

    @abstractmethod
    def boundary_ids(self, last_id: int, stored: Sequence[Message], tools: Tools, kwargs: Kwargs) -> tuple[int, ...]:
        """Ids between a turn that ended with `last_id` and the next message, which the model does not sample."""

    @abstractmethod
    def close_ids(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that close a turn that was cut: the end of an open reasoning block, and the stop."""

    @abstractmethod
    def parse(self, sampled_ids: Sequence[int]) -> ParsedTurn:
        """The message in sampled ids."""

    def template_messages(self, messages: Sequence[Message], first_index: int = 0) -> list[dict[str, Any]]:
        """Messages as the template wants them: content as text."""
        return [{**message, "content": text_of(message.get("content"))} for message in messages]

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        kwargs: Kwargs | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Render a whole conversation. `kwargs` are those of a request, before merging."""
        variables = self.merge_kwargs(kwargs or {})
        return self.template.render(
            self.template_messages(messages),
            tools=list(tools) if tools else None,
            continuation=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def is_closed(self, last_id: int | None) -> bool:
        """Whether a turn that ends with `last_id` has ended by itself."""
        return last_id in self.stop_ids

    def without_stop(self, sampled_ids: Sequence[int]) -> Sequence[int]:
        """Sampled ids without the stop id at their end."""
        return sampled_ids[:-1] if sampled_ids and self.is_closed(sampled_ids[-1]) else sampled_ids

    def check(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise `RequestError` when this family cannot render such a conversation."""
        for index, message in enumerate(messages):
            if message["role"] not in self.roles:
                raise RequestError(
                    f"message {index} has role {message['role']!r}; family {self.name} renders {_names(self.roles)}",
                    code="unsupported_role",
                    message_index=index,
                    field="role",
                )
        if tools and not self.takes_tools:
            raise RequestError(
                f"family {self.name} has no way to declare tools", code="tools_unsupported", field="tools"
            )

    def check_appended(self, appended: Sequence[Message], first_index: int) -> None:
        """Raise `RequestError` when a message may not follow a generated turn."""
        for index, message in enumerate(appended, first_index):
            if message["role"] not in self.append_roles:
                raise RequestError(
                    f"message {index} has role {message['role']!r}; after a generated turn this server appends "
                    f"{_names(self.append_roles)} for family {self.name}",
                    code="role_not_appendable",
                    message_index=index,
                    field="role",
                )


class TemplateFamily(Family):
    """A family with a template of ours, which renders appended messages by themselves (`continuation`)."""

    template_name: ClassVar[str]
    roles_after_turn: ClassVar[frozenset[str]]
    constants: ClassVar[Mapping[str, Any]] = {}
    """Variables with a value that clients may repeat but not change."""
    switches: ClassVar[Mapping[str, Any]] = {}
    """Variables that clients may set, and their defaults."""
    end_of_turn = "<|im_end|>"

    def __init__(self, tokenizer: Tokenizer, options: FamilyOptions | None = None) -> None:
        options = options or FamilyOptions()
        template = ChatTemplate.packaged(self.template_name, limits=options.limits)
        super().__init__(tokenizer, template, self.roles_after_turn, options)
        self.end_id = tokenizer.token_id(self.end_of_turn)
        self.stop_ids = (self.end_id,)
        self._newline = tuple(tokenizer.encode("\n"))

    def merge_kwargs(self, kwargs: Kwargs) -> dict[str, Any]:
        for key, value in kwargs.items():
            if key in self.constants and value != self.constants[key]:
                raise RequestError(
                    f"chat_template_kwargs.{key} is {self.constants[key]!r} for family {self.name} and cannot be "
                    f"{value!r}: "
                    "the history would change",
                    code="conflicting_template_kwarg",
                    field=f"chat_template_kwargs.{key}",
                )
            if key not in self.constants and key not in self.switches:
                raise RequestError(
                    f"family {self.name} does not know chat_template_kwargs.{key}; it knows "
                    f"{_names({*self.constants, *self.switches}) or 'none'}",
                    code="unknown_template_kwarg",
                    field=f"chat_template_kwargs.{key}",
                )
        return {**self.switches, **self.constants, **kwargs}

    def suffix_text(self, stored: Sequence[Message], appended: Sequence[Message], tools: Tools, kwargs: Kwargs) -> str:
        return self.template.render(
            self.template_messages(appended, len(stored)),
            tools=None,
            continuation=True,
            add_generation_prompt=True,
            **self.merge_kwargs(kwargs),
        )

    def boundary_ids(self, last_id: int, stored: Sequence[Message], tools: Tools, kwargs: Kwargs) -> tuple[int, ...]:
        return self._newline if last_id == self.end_id else ()

    def close_ids(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        return (self.end_id,)


def _names(values: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(values))


def _narrow(name: str, allowed: frozenset[str], wanted: frozenset[str] | None) -> frozenset[str]:
    if wanted is None:
        return allowed
    if not wanted <= allowed:
        raise ConfigurationError(
            f"family {name} cannot append {_names(wanted - allowed)} after a generated turn: it appends "
            f"{_names(allowed)}; "
            "the option can only narrow that"
        )
    return wanted
