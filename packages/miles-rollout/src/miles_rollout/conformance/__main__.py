"""`python -m miles_rollout.conformance FILES…`: the failures, a last line with the counts, and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from miles_rollout.conformance import check_files


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python -m miles_rollout.conformance FILES…", file=sys.stderr)
        return 2
    results = check_files(Path(argument) for argument in arguments)
    failed = [result for result in results if result.fault]
    for result in failed:
        print(f"FAILED {result.vector}: {result.fault}")
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
