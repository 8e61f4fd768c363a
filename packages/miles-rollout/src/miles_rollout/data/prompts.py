"""A prompt, and one drawing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class PromptKey(NamedTuple):
    """A prompt in one pass over the data: what settles exactly once."""

    prompt_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.prompt_id!r} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task: messages in OpenAI's form, what the grader compares with, and free metadata for agent and grader."""

    prompt_id: str
    messages: Sequence[Mapping[str, Any]]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt taken from the source. `group_id` is the draw order; `attempt` counts from 0 within the epoch."""

    prompt: Prompt
    epoch: int
    group_id: int
    attempt: int = 0

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.prompt.prompt_id, self.epoch)

    def again(self) -> Draw:
        """The next attempt at the same prompt, at its old place in the order."""
        return replace(self, attempt=self.attempt + 1)
