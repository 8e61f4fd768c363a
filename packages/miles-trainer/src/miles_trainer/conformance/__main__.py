"""`python -m miles_trainer.conformance FILES…`: prints each failure and `N passed, M failed`; non-zero on failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_trainer.conformance import losses, replay
from miles_trainer.conformance.compare import difference
from miles_trainer.errors import NotBuiltError


def check_case(schema: str, family: str, case: dict[str, Any]) -> str | None:
    """Why a case fails, or None."""
    try:
        if schema == "miles-replay-golden/1":
            return _check_replay(case)
        if schema == "miles-trainer-golden/1":
            found = losses.compute(family, case)
            missing = sorted(set(case["expected"]) - set(found))
            if missing:
                return f"not built: {', '.join(missing)}"
            chosen = {name: found[name] for name in case["expected"]}
            return difference(chosen, case["expected"], exact=family == "context_parallel")
        return f"not built: schema {schema}"
    except NotBuiltError as error:
        return str(error)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _check_replay(case: dict[str, Any]) -> str | None:
    kind, value = replay.compute(case)
    if kind not in case:
        return f"{kind} {value!r}, which the case does not expect"
    return difference(value, case[kind], exact=True)


def main(arguments: Sequence[str]) -> int:
    """Check every case of every file; the number of failures decides the exit code."""
    passed = failed = 0
    for name in arguments:
        try:
            content = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"{name}: cannot be read: {error}")
            failed += 1
            continue
        for case in content["cases"]:
            reason = check_case(content["schema"], content["family"], case)
            passed, failed = passed + (reason is None), failed + (reason is not None)
            if reason is not None:
                print(f"{Path(name).name} {case['id']}: {reason}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
