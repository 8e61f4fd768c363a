"""`python -m miles_diffusion.conformance FILES...`: prints each failure and a last line `N passed, M failed`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miles_diffusion.conformance.cases import check_case, numbered_cases
from miles_diffusion.errors import DiffusionError, GoldenFileError


def main(arguments: Sequence[str]) -> int:
    """Check the golden files named by `arguments`; 0 when every case passes, 1 when one fails, 2 without files."""
    if not arguments:
        print("usage: python -m miles_diffusion.conformance FILES...", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    passed = failed = 0
    for case_id, reason in _results([Path(argument) for argument in arguments]):
        if reason is None:
            passed += 1
        else:
            failed += 1
            print(f"FAILED {case_id}: {reason}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def _results(files: Sequence[Path]) -> Iterator[tuple[str, str | None]]:
    """Id of each case and why it fails. A file that cannot be read is one failed case."""
    for file in files:
        try:
            content = _read(file)
        except GoldenFileError as error:
            yield file.name, str(error)
            continue
        for case_id, case in numbered_cases(content, file.name):
            yield case_id, _reason(file.stem, content, case)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GoldenFileError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("cases"), list):
        raise GoldenFileError(f"{file} holds no list of cases")
    return content


def _reason(base_name: str, content: Mapping[str, Any], case: Mapping[str, Any]) -> str | None:
    try:
        return check_case(base_name, content, case)
    except (DiffusionError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
