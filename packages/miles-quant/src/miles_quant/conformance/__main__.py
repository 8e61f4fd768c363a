"""`python -m miles_quant.conformance FILES...`: prints each failure and a last line `N passed, M failed`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from miles_quant.conformance.cases import check_case
from miles_quant.conformance.golden import read_golden
from miles_quant.errors import GoldenFileError, QuantError


def main(arguments: Sequence[str]) -> int:
    """Check the golden files named by `arguments`; 0 when every case passes, 1 when one fails, 2 without files."""
    if not arguments:
        print("usage: python -m miles_quant.conformance FILES...", file=sys.stderr)
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
    """Name of each case and why it fails. A file that cannot be read is one failed case."""
    for file in files:
        try:
            golden = read_golden(file)
        except GoldenFileError as error:
            yield file.name, str(error)
            continue
        for number, case in enumerate(golden["cases"]):
            yield f"{file.name}[{case.get('id', number)}]", _reason(golden["format"], case)


def _reason(family: str, case: dict[str, object]) -> str | None:
    try:
        return check_case(family, case)
    except (QuantError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
