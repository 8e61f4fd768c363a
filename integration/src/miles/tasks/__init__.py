"""Tasks that ship with Miles: prompts, an agent that speaks OpenAI chat, and a grader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_rollout import Prompt
from miles_rollout.protocols import Agent

__all__ = ["RolloutTask"]


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """What a run needs of a task. `grader` is a dotted path: graders run in processes of their own.

    `held_out` are named sets of prompts kept apart from training; the first is the one `heldout/success` speaks of.
    """

    training: Sequence[Prompt]
    held_out: Mapping[str, Sequence[Prompt]]
    agent: Agent
    grader: str
    close: Callable[[], Awaitable[None]]
