"""`python -m tools.lengths`: how long functions and files are, the longest of each, and which are over the limit."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tools.workspace import PACKAGES, ROOT

FUNCTION_LIMIT = 80
FILE_LIMIT = 600
_SHOWN = 8


@dataclass(frozen=True, slots=True, order=True)
class Length:
    """Lines of a function or file."""

    lines: int
    where: str


def file_lengths() -> Iterator[Length]:
    """Lines of each source file of the packages."""
    for package in PACKAGES:
        for file in sorted(package.source.rglob("*.py")):
            yield Length(file.read_text(encoding="utf-8").count("\n"), file.relative_to(ROOT).as_posix())


def function_lengths() -> Iterator[Length]:
    """Lines of each function of the packages, signature and docstring included."""
    for file in file_lengths():
        for node in ast.walk(ast.parse((ROOT / file.where).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Length(
                    (node.end_lineno or node.lineno) - node.lineno + 1, f"{file.where}:{node.lineno} {node.name}"
                )


def too_long() -> list[str]:
    """One line for each function or file over its limit."""
    functions = [
        f"{length.where}: {length.lines} lines" for length in function_lengths() if length.lines > FUNCTION_LIMIT
    ]
    files = [f"{length.where}: {length.lines} lines" for length in file_lengths() if length.lines > FILE_LIMIT]
    return functions + files


def main() -> int:
    """Print the report; 1 when something is over its limit."""
    for what, lengths in (("functions", sorted(function_lengths())), ("files", sorted(file_lengths()))):
        median = statistics.median(length.lines for length in lengths)
        print(f"{len(lengths)} {what}, median {median:g} lines; the longest:")
        for length in reversed(lengths[-_SHOWN:]):
            print(f"  {length.lines:4d}  {length.where}")
    over = too_long()
    print(f"over the limit ({FUNCTION_LIMIT} a function, {FILE_LIMIT} a file): {len(over)}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
