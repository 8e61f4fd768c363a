"""Tasks that ship with Miles: prompts, an agent that speaks OpenAI chat, and a grader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from miles_rollout import Prompt
from miles_rollout.protocols import Agent

__all__ = ["RolloutTask"]


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """What a run needs of a task. `grader` is a dotted path: graders run in processes of their own."""

    training: Sequence[Prompt]
    held_out: Sequence[Prompt]
    agent: Agent
    grader: str
    close: Callable[[], Awaitable[None]]
