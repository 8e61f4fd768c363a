"""Comparison of nested lists of numbers, and the outcome of a case."""

from __future__ import annotations

import math
from typing import Any

RTOL, ATOL = 1e-9, 1e-12


def difference(found: Any, expected: Any, *, exact: bool, where: str = "") -> str | None:
    """The first place where `found` is not `expected`, or None. Floats are compared within rtol 1e-9 and atol 1e-12."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or set(found) != set(expected):
            return f"{where or 'value'}: keys {_keys(found)} instead of {_keys(expected)}"
        return _first(difference(found[k], expected[k], exact=exact, where=f"{where}.{k}") for k in expected)
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return f"{where or 'value'}: {_size(found)} instead of {_size(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        return _first(difference(f, e, exact=exact, where=f"{where}[{i}]") for i, (f, e) in pairs)
    if _equal(found, expected, exact):
        return None
    return f"{where or 'value'}: {found!r} instead of {expected!r}"


def _first(differences: Any) -> str | None:
    return next((d for d in differences if d is not None), None)


def _equal(found: Any, expected: Any, exact: bool) -> bool:
    if exact or isinstance(expected, str | bool) or expected is None:
        return bool(type(found) is type(expected) and found == expected)
    return isinstance(found, int | float) and math.isclose(found, expected, rel_tol=RTOL, abs_tol=ATOL)


def _keys(value: Any) -> list[str]:
    return sorted(value) if isinstance(value, dict) else [type(value).__name__]


def _size(value: Any) -> str:
    return f"{len(value)} items" if isinstance(value, list) else f"{value!r}"
