"""Where prompts are drawn from, and the frontier: which drawn prompts are still owed an outcome.

A count of drawn prompts is no position to resume from: prompts finish out of order, fail and come back. The frontier
is therefore the offset *and* the set of prompts that were drawn and have not settled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_rollout.config import DataConfig
from miles_rollout.data.files import read_prompts
from miles_rollout.data.prompts import Draw, Prompt, PromptKey
from miles_rollout.errors import FrontierError, LedgerError, PromptFileError


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """The shuffled positions of one epoch: Python's `random` seeded with seed + epoch, over the file's order."""
    order = list(range(size))
    random.Random(seed + epoch).shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class Frontier:
    """A position in the data. `unsettled` holds (prompt id, epoch, group id, attempt) in draw order."""

    epoch: int
    offset: int
    next_group_id: int
    unsettled: tuple[tuple[str, int, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "next_group_id": self.next_group_id,
            "unsettled": [list(entry) for entry in self.unsettled],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Frontier:
        """Raises FrontierError when a field is missing or malformed."""
        try:
            unsettled = tuple((str(p), int(e), int(g), int(a)) for p, e, g, a in data["unsettled"])
            return cls(int(data["epoch"]), int(data["offset"]), int(data["next_group_id"]), unsettled)
        except (KeyError, TypeError, ValueError) as error:
            raise FrontierError(f"this is no saved data position: {error!r}") from error


class PromptSource:
    """Prompts in epoch order; prompts given back are served first, oldest draw first."""

    def __init__(self, prompts: Iterable[Prompt], config: DataConfig) -> None:
        self._prompts = tuple(prompts)
        self._by_id = {prompt.prompt_id: prompt for prompt in self._prompts}
        if not self._prompts:
            raise PromptFileError("there are no prompts to draw from")
        if len(self._by_id) != len(self._prompts):
            raise PromptFileError("two prompts have the same id; ids must differ")
        self._config = config
        self._epoch = 0
        self._offset = 0
        self._next_group_id = 0
        self._order = self._order_of(0)
        self._returned: deque[Draw] = deque()
        self._unsettled: dict[PromptKey, Draw] = {}

    @classmethod
    def from_file(cls, path: str | Path, config: DataConfig) -> PromptSource:
        return cls(read_prompts(path, config), config)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def exhausted(self) -> bool:
        """Whether `draw` would give nothing now. A prompt given back later makes it false again."""
        return not self._returned and self._at_end()

    @property
    def returned(self) -> frozenset[PromptKey]:
        """Prompts that were given back and not drawn again."""
        return frozenset(draw.key for draw in self._returned)

    def draw(self) -> Draw | None:
        """The next prompt, or None at the end of the last epoch."""
        if self._returned:
            draw = self._returned.popleft()
        elif self._at_end():
            return None
        else:
            draw = self._draw_new()
        self._unsettled[draw.key] = draw
        return draw

    def draw_many(self, count: int) -> list[Draw]:
        """`count` prompts, over as many epochs as that takes; fewer only at the end of the last epoch."""
        draws = (self.draw() for _ in range(count))
        return [draw for draw in draws if draw is not None]

    def give_back(self, key: PromptKey) -> Draw:
        """Serve this unsettled prompt again, before new ones, as its next attempt."""
        draw = self._owed(key).again()
        if key in self.returned:
            raise LedgerError(f"prompt {key} was given back twice")
        self._unsettled[key] = draw
        self._returned = deque(sorted((*self._returned, draw), key=lambda item: item.group_id))
        return draw

    def settle(self, key: PromptKey) -> None:
        """This prompt has its outcome. Raises LedgerError when none was owed."""
        self._owed(key)
        del self._unsettled[key]

    def frontier(self) -> Frontier:
        """What to save: every drawn prompt that has not settled will be drawn again after `load_frontier`."""
        unsettled = sorted(self._unsettled.values(), key=lambda draw: draw.group_id)
        entries = tuple((draw.prompt.prompt_id, draw.epoch, draw.group_id, draw.attempt) for draw in unsettled)
        return Frontier(self._epoch, self._offset, self._next_group_id, entries)

    def load_frontier(self, frontier: Frontier) -> None:
        """Continue from a saved position: its unsettled prompts come first, none twice, then new ones."""
        missing = [entry[0] for entry in frontier.unsettled if entry[0] not in self._by_id]
        if missing or not 0 <= frontier.offset <= len(self._prompts):
            raise FrontierError(
                f"the saved position does not fit these {len(self._prompts)} prompts (offset {frontier.offset}, "
                f"unknown prompt ids {missing[:5]}): resume with the prompt file of that run"
            )
        self._epoch, self._offset = frontier.epoch, frontier.offset
        self._next_group_id = frontier.next_group_id
        self._order = self._order_of(frontier.epoch)
        draws = [Draw(self._by_id[p], epoch, group_id, attempt) for p, epoch, group_id, attempt in frontier.unsettled]
        self._returned = deque(sorted(draws, key=lambda draw: draw.group_id))
        self._unsettled = {draw.key: draw for draw in draws}

    def _order_of(self, epoch: int) -> Sequence[int]:
        size = len(self._prompts)
        return epoch_order(self._config.seed, epoch, size) if self._config.shuffle else range(size)

    def _at_end(self) -> bool:
        epochs = self._config.epochs
        return epochs is not None and self._offset >= len(self._prompts) and self._epoch + 1 >= epochs

    def _draw_new(self) -> Draw:
        if self._offset >= len(self._prompts):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        prompt = self._prompts[self._order[self._offset]]
        draw = Draw(prompt, self._epoch, self._next_group_id)
        self._offset += 1
        self._next_group_id += 1
        return draw

    def _owed(self, key: PromptKey) -> Draw:
        if key not in self._unsettled:
            raise LedgerError(f"prompt {key} is owed no outcome: it was never drawn or has settled already")
        return self._unsettled[key]
