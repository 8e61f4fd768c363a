"""JSON that is read strictly: no repeated key, no NaN, no document nested deeper than the interpreter can follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn


class JsonSyntaxError(ValueError):
    """The text is no JSON."""


class RepeatedKeyError(ValueError):
    """An object names a key twice."""


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises JsonSyntaxError or RepeatedKeyError."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RepeatedKeyError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonSyntaxError(f"not JSON: {error}") from None


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKeyError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise JsonSyntaxError(f"{name} is no JSON number")
