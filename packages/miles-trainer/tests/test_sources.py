"""Sources: whole groups, line numbers in errors, equal seeds give equal data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from miles_trainer import JsonlSource, SourceError, SyntheticSource

LINE = {
    "group_id": "p0",
    "rollout_id": "p0/0",
    "token_ids": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "logprobs": [0, -1.25, -0.5],
    "reward": 1,
}


def _write(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_batches_hold_whole_groups_in_order_of_appearance(tmp_path: Path) -> None:
    lines = [LINE | {"group_id": g, "rollout_id": f"{g}/{i}"} for i, g in enumerate("abacb")]
    source = JsonlSource(_write(tmp_path / "d.jsonl", lines), groups_per_batch=2, epochs=2)
    batches = []
    while (batch := source.next_batch()) is not None:
        batches.append([sample.group_id for sample in batch])
    assert batches == [["a", "a", "b", "b"], ["c"]] * 2


def test_a_line_becomes_a_sample(tmp_path: Path) -> None:
    routes = {"rows": [[[1, 2]]], "missing_spans": [[1, 1]], "layers": [0], "num_experts": 4, "top_k": 2}
    line = LINE | {"version_spans": [[0, -1], [1, 3]], "temperature": 0.5, "routed_experts": routes}
    batch = JsonlSource(_write(tmp_path / "d.jsonl", [line, ""]), groups_per_batch=1).next_batch()
    assert batch is not None
    sample = batch[0]
    assert sample.token_ids.dtype == np.int32
    assert sample.logprobs.tolist() == [0, -1.25, -0.5]
    assert (sample.version_spans, sample.temperature, sample.reward) == (((0, -1), (1, 3)), 0.5, 1.0)
    assert sample.routed_experts is not None
    assert sample.routed_experts.rows.shape == (1, 1, 2)
    assert sample.routed_experts.missing_spans == ((1, 1),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"a": 1}', "line 2: group_id"),
        (LINE | {"reward": "x"}, "line 2: reward"),
        (LINE | {"rewrd": 1}, "line 2: rewrd"),
        (LINE | {"loss_mask": [0, 2, 1]}, "line 2: loss_mask.1"),
        (LINE | {"loss_mask": [0, 1]}, "line 2: 3 token_ids, 2 loss_mask"),
        ([1], "line 2"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        JsonlSource(_write(tmp_path / "d.jsonl", [LINE, line]), groups_per_batch=1)


def test_absent_empty_and_impossible_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        JsonlSource(tmp_path / "absent.jsonl", groups_per_batch=1)
    with pytest.raises(SourceError, match="no samples"):
        JsonlSource(_write(tmp_path / "empty.jsonl", [""]), groups_per_batch=1)
    with pytest.raises(SourceError, match="at least 1"):
        JsonlSource(_write(tmp_path / "d.jsonl", [LINE]), groups_per_batch=0)


def test_synthetic_batches_repeat_with_the_seed_and_end() -> None:
    first, second = (SyntheticSource(vocab_size=10, steps=2, seed=4) for _ in range(2))
    for _ in range(2):
        one, two = first.next_batch(), second.next_batch()
        assert one is not None
        assert two is not None
        assert len({sample.group_id for sample in one}) == 2
        for a, b in zip(one, two, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
    assert first.next_batch() is None
