"""What a run writes is what `contracts/metrics/v1` promises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from jsonschema import Draft202012Validator

from miles.run_folder import read_jsonl

CONTRACT = Path(__file__).parents[2] / "contracts" / "metrics" / "v1"


def test_every_row_has_promised_names_and_finite_numbers(run_tiny: Callable[..., Path]) -> None:
    folder = run_tiny(loop__steps=2, task__held_out=8)
    rows = read_jsonl(folder / "metrics.jsonl")
    promised = json.loads((CONTRACT / "names.json").read_text())
    validator = Draft202012Validator(json.loads((CONTRACT / "schema.json").read_text()))
    patterns = [re.compile(pattern) for pattern in promised["patterns"]]
    for row in rows:
        validator.validate(row)
        unknown = [key for key in row if key not in promised["names"] and not any(p.match(key) for p in patterns)]
        assert unknown == []
        assert all(abs(value) < float("inf") for value in row.values())
    assert any("heldout/success" in row for row in rows)
    assert any("reward/mean" in row for row in rows)


def test_history_of_the_run_is_sound(run_tiny: Callable[..., Path]) -> None:
    from miles_rollout import check_history, read_events

    folder = run_tiny(loop__steps=3, loop__evaluate=False)
    history = check_history(list(read_events(folder / "events.jsonl")))
    assert history.sound, history.faults
    assert history.outcomes["trained"] == 3 * 4
