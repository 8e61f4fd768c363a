"""The record digest agrees with the contract's golden file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_rollout.records import Record, expert_digest, record_digest

GOLDEN = Path(__file__).parents[4] / "contracts" / "trajectory" / "v1" / "record_digest.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]


def record_of(case: dict[str, Any]) -> Record:
    experts = case["experts"]
    rows = None
    if experts is not None:
        # A case without rows does not say how many layers and experts they would have; it was made with 2 and 2.
        rows = np.array(experts["rows"], dtype=np.int32).reshape(len(experts["rows"]), *_shape(experts["rows"]))
    return Record(
        input_ids=case["input_ids"],
        output_ids=case["output_ids"],
        logprobs=np.array(case["logprobs"], dtype=np.float32),
        version_spans=[tuple(span) for span in case["version_spans"]],
        experts=rows,
        expert_row_start=experts["row_start"] if experts else 0,
        expert_version_spans=[tuple(span) for span in experts["version_spans"]] if experts else (),
    )


def _shape(rows: list[list[list[int]]]) -> tuple[int, int]:
    return (len(rows[0]), len(rows[0][0])) if rows else (2, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_digests_are_those_of_the_contract(case: dict[str, Any]) -> None:
    record = record_of(case)
    assert record_digest(record) == case["record_digest"]
    assert expert_digest(record) == case["expert_digest"]
