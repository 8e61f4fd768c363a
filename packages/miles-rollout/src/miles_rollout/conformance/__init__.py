"""Golden vectors: `python -m miles_rollout.conformance FILES…` reads them, computes, compares, and counts.

A file's base name selects how its lines are checked. What this package does not compute yet fails as "not built".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_rollout.conformance.buffers import check_buffer
from miles_rollout.conformance.numbers import check_number
from miles_rollout.conformance.rewards import check_reward

Check = Callable[[Mapping[str, Any]], None]
"""Raises AssertionError or NotBuiltError when a vector does not hold."""

CHECKS: Mapping[str, Check] = {
    "buffer": check_buffer,
    "numeric": check_number,
    "rewards": check_reward,
    "hostile": check_reward,
}


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one vector; `fault` is empty when it passed."""

    vector: str
    fault: str = ""


def check_files(files: Iterable[Path]) -> list[Result]:
    """Check every line of every file. A file that cannot be read is one failed result."""
    return [result for file in files for result in _check_file(file)]


def _check_file(file: Path) -> list[Result]:
    check = CHECKS.get(file.stem)
    try:
        vectors = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        return [Result(str(file), f"cannot be read: {error}")]
    if not vectors:
        return [Result(str(file), "holds no vector")]
    return [_check_vector(file, number, vector, check) for number, vector in enumerate(vectors, start=1)]


def _check_vector(file: Path, number: int, vector: Any, check: Check | None) -> Result:
    name = f"{file.name}:{vector.get('id', number) if isinstance(vector, dict) else number}"
    if check is None:
        return Result(name, f"not built: nothing here checks {file.stem!r}")
    try:
        check(vector)
    except Exception as error:  # noqa: BLE001 - any error is a failed vector, and the others are still checked
        return Result(name, f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error))
    return Result(name)
