"""Batch sources: samples from a JSONL file, or made up from a seed.

A line of a JSONL file is an object with the fields of `Sample`; `loss_mask` 1 marks sampled tokens (or targets, for
supervised training). `logprobs` (default zeros), `version_spans`, `reward`, `temperature` and `routed_experts` may be
left out:

    {"group_id": "p0", "rollout_id": "p0/0", "token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0, -1.2,
    -0.3], "reward": 1}

Shapes: T tokens, R expert rows, L routed layers, K experts a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miles_trainer.errors import SourceError
from miles_trainer.sample import RoutedExperts, Sample


class _RoutesLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rows: list[list[list[int]]]
    missing_spans: list[tuple[int, int]] = []
    layers: list[int]
    num_experts: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)]

    def routes(self) -> RoutedExperts:
        rows = np.asarray(self.rows, dtype=np.int32).reshape(len(self.rows), len(self.layers), self.top_k)
        return RoutedExperts(rows, tuple(self.missing_spans), tuple(self.layers), self.num_experts, self.top_k)


class _SampleLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    group_id: Annotated[str, Field(min_length=1)]
    rollout_id: Annotated[str, Field(min_length=1)]
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]]
    logprobs: list[float] | None = None
    version_spans: list[tuple[int, int]] = []
    reward: float = 0.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    routed_experts: _RoutesLine | None = None

    def sample(self) -> Sample:
        logprobs = [0.0] * len(self.token_ids) if self.logprobs is None else self.logprobs
        if not len(self.token_ids) == len(self.loss_mask) == len(logprobs):
            raise ValueError(
                f"{len(self.token_ids)} token_ids, {len(self.loss_mask)} loss_mask values, {len(logprobs)} logprobs: "
                "make them equal"
            )
        return Sample(
            group_id=self.group_id,
            rollout_id=self.rollout_id,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self.loss_mask, dtype=np.uint8),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            version_spans=tuple(self.version_spans),
            reward=self.reward,
            temperature=self.temperature,
            routed_experts=None if self.routed_experts is None else self.routed_experts.routes(),
        )


def parse_sample(line: str, place: str) -> Sample:
    """One line of a file. Raises SourceError that names `place` and the field."""
    try:
        return _SampleLine.model_validate(json.loads(line)).sample()
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "object"
        raise SourceError(f"{place}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise SourceError(f"{place}: {error}") from error


class JsonlSource:
    """Batches of whole groups from a file, in the order groups first appear. The file is read and checked at once."""

    def __init__(self, path: Path, *, groups_per_batch: int, epochs: int = 1) -> None:
        """`epochs`: passes over the file. Raises SourceError naming the line when a line is not a sample."""
        if groups_per_batch < 1 or epochs < 1:
            raise SourceError(f"groups_per_batch {groups_per_batch} and epochs {epochs} must be at least 1")
        self._groups = list(_read_groups(Path(path)).values())
        self._batches = self._iterate(groups_per_batch, epochs)

    def _iterate(self, size: int, epochs: int) -> Iterator[list[Sample]]:
        for _ in range(epochs):
            for start in range(0, len(self._groups), size):
                yield [sample for group in self._groups[start : start + size] for sample in group]

    def next_batch(self) -> Sequence[Sample] | None:
        """The samples of the next step, or None at the end."""
        return next(self._batches, None)


def _read_groups(path: Path) -> dict[str, list[Sample]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    groups: dict[str, list[Sample]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            sample = parse_sample(line, f"{path} line {number}")
            groups.setdefault(sample.group_id, []).append(sample)
    if not groups:
        raise SourceError(f"{path} holds no samples")
    return groups


class SyntheticSource:
    """Random tokens, equal at equal seeds: for timing and tests of the trainer alone. Half of each response is
    rewarded.
    """

    def __init__(
        self, *, vocab_size: int, steps: int, groups: int = 2, members: int = 4, tokens: int = 32, seed: int = 0
    ) -> None:
        self._generator = np.random.default_rng(seed)
        self._vocab_size, self._remaining = vocab_size, steps
        self._groups, self._members, self._tokens = groups, members, tokens

    def next_batch(self) -> Sequence[Sample] | None:
        """The samples of the next step, or None at the end."""
        if self._remaining == 0:
            return None
        self._remaining -= 1
        return [self._sample(group, member) for group in range(self._groups) for member in range(self._members)]

    def _sample(self, group: int, member: int) -> Sample:
        token_ids = self._generator.integers(0, self._vocab_size, self._tokens).astype(np.int32)
        prompt = max(self._tokens // 4, 1)
        mask = (np.arange(self._tokens) >= prompt).astype(np.uint8)
        return Sample(
            group_id=f"g{self._remaining}.{group}",
            rollout_id=f"g{self._remaining}.{group}/{member}",
            token_ids=token_ids,
            loss_mask=mask,
            logprobs=np.where(mask > 0, -np.log(self._vocab_size), 0.0).astype(np.float32),
            version_spans=(),
            reward=float(member % 2),
        )
