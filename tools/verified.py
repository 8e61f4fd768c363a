"""`python -m tools.verified RESULTS.json` writes docs/verified.md from results of `pytest --verified RESULTS.json`.

`python -m tools.verified --check`: every row of the document is declared by a test of today, and the list of what was
not exercised is that of tools/verified.toml.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.workspace import ROOT, read_toml, tracked_files

TARGET = ROOT / "docs" / "verified.md"
_HEADER = """# What was verified

<!-- Written by `python -m tools.verified` from the results of tests. Do not edit. -->

Tests declare which genuine package they met. A row says what a test has shown with that version, and how it ended.
"""
_ROW = re.compile(r"^\| `([^`]+)` \| [^|]* \| ([^|]+) \|", re.MULTILINE)

Declared = tuple[str, str]


def rendered(where: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The document."""
    lines = [_HEADER, f"\nLast run: {where}.\n"]
    lines.append("\n| met | version | shown | test | passed | failed | skipped |\n|---|---|---|---|---|---|---|\n")
    for (package, version, claim, file), outcomes in sorted(_grouped(results).items()):
        counts = " | ".join(str(outcomes[name]) for name in ("passed", "failed", "skipped"))
        lines.append(f"| `{package}` | {version} | {claim} | `{file}` | {counts} |\n")
    return "".join([*lines, _not_exercised()])


def _grouped(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str, str], Counter[str]]:
    grouped: dict[tuple[str, str, str, str], Counter[str]] = {}
    for result in results:
        file = str(result["test"]).partition("::")[0]
        key = (str(result["package"]), str(result["version"]), str(result["claim"]), file)
        grouped.setdefault(key, Counter())[str(result["outcome"])] += 1
    return grouped


def _not_exercised() -> str:
    rows = "".join(f"| {name} | {reason} |\n" for name, reason in _missing().items())
    return (
        f"\n## Not exercised\n\nNo test has met these. Nothing is claimed about them.\n\n| | why |\n|---|---|\n{rows}"
    )


def _missing() -> Mapping[str, str]:
    return read_toml("tools/verified.toml")["not_exercised"]  # type: ignore[no-any-return]


def declared() -> set[Declared]:
    """(package, claim) of every mark in a tracked test file."""
    return {pair for file in tracked_files("*.py") for pair in declared_in(file.read_text(encoding="utf-8"))}


def declared_in(source: str) -> Iterator[Declared]:
    """(package, claim) of the marks in a test file, read without running it."""
    if "mark.verifies(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "verifies":
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if len(texts) == 2:
                yield str(texts[0]), str(texts[1])


def complaints(document: str, marks: set[Declared]) -> list[str]:
    """What the document says and no test does, and a list of missing things that is not today's."""
    rows = [(package, claim.strip()) for package, claim in _ROW.findall(document)]
    stale = [f"no test declares {package}: {claim}" for package, claim in rows if (package, claim) not in marks]
    met = {package for package, _ in marks}
    known = [f"{name} is listed as not exercised, and a test declares it" for name in _missing() if name in met]
    tail = [] if document.endswith(_not_exercised()) else ["the list of what was not exercised is not verified.toml's"]
    return stale + known + tail


def main(arguments: list[str]) -> int:
    """Write the document, or with --check compare it with the tests' declarations."""
    match arguments:
        case ["--check"]:
            found = complaints(TARGET.read_text(encoding="utf-8"), declared())
            print("\n".join(found), end="\n" if found else "")
            return 1 if found else 0
        case [file]:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            TARGET.write_text(rendered(content["where"], content["results"]), encoding="utf-8")
            return 0
        case _:
            print("usage: python -m tools.verified RESULTS.json | --check", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
