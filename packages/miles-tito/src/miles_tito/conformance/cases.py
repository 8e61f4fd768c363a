"""Which function checks a golden file, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_tito.errors import TitoError

from . import ids, sessions, texts
from .found import Case, NotBuiltError, Tokenizers, WrongError

Check = Callable[[Case, Path, Tokenizers], None]
# What malformed data or a wrong computation can raise; anything else is a bug of the checker and is shown as one.
_FAILURES = (WrongError, NotBuiltError, TitoError, KeyError, TypeError, ValueError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case: passed when `reason` is None."""

    case_id: str
    reason: str | None = None


def check_file(path: Path, tokenizers: Tokenizers) -> Iterator[Outcome]:
    """Check every case of a golden file. A file that cannot be read is one failed case."""
    try:
        cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        yield Outcome(str(path), f"cannot be read: {error}")
        return
    if not cases:
        yield Outcome(str(path), "holds no cases")
    check = _check_for(path)
    for number, case in enumerate(cases, 1):
        yield _check_case(check, case, number, path, tokenizers)


def _check_case(check: Check, case: Any, number: int, path: Path, tokenizers: Tokenizers) -> Outcome:
    name = str(case.get("id", f"line {number}")) if isinstance(case, Mapping) else f"line {number}"
    try:
        check(case, path, tokenizers)
    except NotBuiltError as error:
        return Outcome(name, f"not built: {error}")
    except _FAILURES as error:
        return Outcome(name, f"{type(error).__name__}: {error}")
    return Outcome(name)


def _check_for(path: Path) -> Check:
    """The check for a file, by its folder and base name."""
    if path.parent.name == "splice":
        return texts.check_splice
    if path.parent.name == "tokens":
        return ids.check_splice_ids if path.stem.startswith("splice_") else ids.check_ids
    if path.stem.startswith("comparator_"):
        return ids.check_comparator
    named: dict[str, Check] = {"matchers": texts.check_matcher, "sessions": sessions.check_session}
    return named.get(path.stem, texts.check_render)
