"""Comparing a computed value with an expected one."""

from __future__ import annotations

from typing import Any


class NotBuiltError(NotImplementedError):
    """This package does not compute such a value yet."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not built: {what}")


def expect_equal(what: str, actual: Any, expected: Any, *, tolerance: float = 0.0) -> None:
    """Raise AssertionError unless both are equal: numbers within the tolerance, lists and objects by element."""
    assert _equal(actual, expected, tolerance), f"{what}: expected {expected!r}, got {actual!r}"


def _equal(actual: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            key in actual and _equal(actual[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(actual) == len(expected)
            and all(_equal(a, e, tolerance) for a, e in zip(actual, expected, strict=True))
        )
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return type(actual) is type(expected) and bool(actual == expected)
    is_number = isinstance(actual, int | float) and not isinstance(actual, bool)
    return is_number and abs(actual - expected) <= tolerance
