"""Golden vectors against the public functions: `python -m miles_weightsync.conformance FILES…`.

Prints each failure and, last, `N passed, M failed`; the exit status says whether all passed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_weightsync.errors import NameSetError, WeightSyncError
from miles_weightsync.golden import OPERATIONS

SCHEMA = "miles-weightsync-golden/1"

Case = Mapping[str, Any]
Operation = Callable[[Mapping[str, Any], Any], Any]


def check_case(family: str, case: Case) -> str | None:
    """Why a case fails, None when it passes."""
    operation: Operation | None = OPERATIONS.get((family, case["op"]))
    if operation is None:
        return f"not built: {family}/{case['op']}"
    try:
        result = operation(case.get("params", {}), case["input"])
    except WeightSyncError as error:
        return _judge_error(case, error)
    if "expect_error" in case:
        return f"expected error {case['expect_error']}, got {_text(result)}"
    return None if _equal(result, case["expect"]) else f"expected {_text(case['expect'])}, got {_text(result)}"


def _judge_error(case: Case, error: WeightSyncError) -> str | None:
    if case.get("expect_error") != error.code:
        wanted = f"error {case['expect_error']}" if "expect_error" in case else _text(case.get("expect"))
        return f"expected {wanted}, got error {error.code}: {error}"
    if "error_names" in case and not _equal(_names(error), case["error_names"]):
        return f"expected names {_text(case['error_names'])}, got {_text(_names(error))}"
    return None


def _names(error: WeightSyncError) -> Any:
    return dict(error.by_kind()) if isinstance(error, NameSetError) else error.names


def _equal(result: Any, expected: Any) -> bool:
    """Equality of JSON values: tuples are lists, and true is not 1."""
    return json.dumps(result, sort_keys=True) == json.dumps(expected, sort_keys=True)


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"


def check_file(path: Path) -> tuple[int, list[str]]:
    """The number of cases that pass, and a line for each that fails."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return 0, [f"{path}: cannot be read: {error}"]
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return 0, [f"{path}: not built: schema {document.get('schema') if isinstance(document, dict) else None}"]
    family, failures = document["family"], []
    for case in document["cases"]:
        reason = check_case(family, case)
        if reason is not None:
            failures.append(f"{path.name}: {case['id']}: {reason}")
    return len(document["cases"]) - len(failures), failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Check files; returns the exit status."""
    files = list(sys.argv[1:] if arguments is None else arguments)
    if not files:
        print("usage: python -m miles_weightsync.conformance FILES…", file=sys.stderr)
        return 2
    passed, failures = 0, []
    for file in files:
        count, lines = check_file(Path(file))
        passed += count
        failures += lines
    print(*failures, f"{passed} passed, {len(failures)} failed", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
