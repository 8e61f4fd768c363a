"""From a conversation to prompt ids without ever encoding a stored turn again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .families.base import Family, Kwargs, Tools
from .messages import Message


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """The end of the stored ids as far as a splice needs it: what the last turn sampled."""

    sampled_ids: Sequence[int]

    @property
    def last_id(self) -> int | None:
        return self.sampled_ids[-1] if len(self.sampled_ids) else None


def first_prompt_ids(family: Family, messages: Sequence[Message], tools: Tools, kwargs: Kwargs) -> list[int]:
    """Ids of a whole conversation and the generation prompt."""
    return family.tokenizer.encode(family.render(messages, tools, kwargs, add_generation_prompt=True))


def next_prompt_suffix(
    family: Family,
    turn: StoredTurn,
    stored: Sequence[Message],
    appended: Sequence[Message],
    tools: Tools,
    kwargs: Kwargs,
) -> list[int]:
    """Ids to append to the stored ones: the close of a cut turn, the boundary, and the appended messages with their
    prompt.

    `stored` ends with the assistant message of `turn`. Everything returned is loss 0. The stored ids are not looked at.
    """
    last = turn.last_id
    closing: tuple[int, ...] = ()
    if last is None or not family.is_closed(last):
        closing = family.close_ids(turn.sampled_ids)
        last = closing[-1]
    boundary = family.boundary_ids(last, stored, tools, kwargs)
    text = family.suffix_text(stored, appended, tools, kwargs)
    return [*closing, *boundary, *family.tokenizer.encode(text)]
