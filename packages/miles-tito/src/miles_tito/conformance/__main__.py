"""Command line of the conformance check."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from miles_tito.fetch import tokenizers_dir

from .cases import check_file
from .found import Tokenizers


def main(arguments: list[str] | None = None) -> int:
    """Check the files named; returns 1 when any case failed."""
    parser = argparse.ArgumentParser(prog="python -m miles_tito.conformance", description="Check golden vectors.")
    parser.add_argument("files", nargs="+", type=Path, help="golden .jsonl files")
    parser.add_argument("--tokenizers", type=Path, default=tokenizers_dir(), help="folder of real tokenizers")
    options = parser.parse_args(arguments)
    tokenizers = Tokenizers(options.tokenizers)
    passed = failed = 0
    for path in options.files:
        for outcome in check_file(path, tokenizers):
            passed += outcome.reason is None
            failed += outcome.reason is not None
            if outcome.reason is not None:
                print(f"FAILED {path.name}: {outcome.case_id}: {outcome.reason}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
