"""`python -m tools.conformance [SUITE...]`: golden vectors through each entry point, against the known-missing list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, read_toml

GOLDEN = ROOT.parent / "shared" / "golden"
LIST = "tools/conformance.toml"
NOT_BUILT = ": not built"
_LAST_LINE = re.compile(r"(\d+) passed, (\d+) failed")


@dataclass(frozen=True, slots=True)
class Suite:
    """Golden files of one package.

    Attributes:
        name: name in the list.
        module: entry point, run with `python -m`.
        files: globs relative to the golden folder.
        known_missing: cases that fail because their part is not built.
        arguments: further arguments of the entry point.
    """

    name: str
    module: str
    files: tuple[str, ...]
    known_missing: int
    arguments: tuple[str, ...] = ()

    def paths(self) -> list[Path]:
        """The golden files, sorted."""
        return sorted({path for pattern in self.files for path in GOLDEN.glob(pattern)})


def suites() -> list[Suite]:
    """The suites of the list."""
    return [
        Suite(
            name=name,
            module=entry["module"],
            files=tuple(entry["files"]),
            known_missing=entry["known_missing"],
            arguments=tuple(entry.get("arguments", ())),
        )
        for name, entry in read_toml(LIST).items()
    ]


def run_suite(suite: Suite, *, timeout_s: float = 600) -> str:
    """What the entry point printed."""
    command = [sys.executable, "-m", suite.module, *map(str, suite.paths()), *suite.arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.stdout + done.stderr


def verdict(suite: Suite, output: str) -> str | None:
    """Why the output of a suite is not what the list says; None when it is."""
    lines = output.strip().splitlines()
    closing = _LAST_LINE.fullmatch(lines[-1].strip()) if lines else None
    if closing is None:
        return f"{suite.name} printed no closing line `N passed, M failed`:\n{output[-2000:]}"
    failed = int(closing[2])
    excused = [line for line in lines[:-1] if NOT_BUILT in line]
    if failed != len(excused):
        others = [line for line in lines[:-1] if line not in excused]
        return f"{suite.name}: {failed - len(excused)} failures beside `not built`:\n" + "\n".join(others[-20:])
    if failed > suite.known_missing:
        return f"{suite.name}: {failed} cases are not built, {LIST} knows {suite.known_missing}: something was lost"
    if failed < suite.known_missing:
        return f"{suite.name}: {failed} cases are not built, fewer than known: set known_missing = {failed} in {LIST}"
    return None


def previous_lists() -> list[Mapping[str, int]]:
    """Known-missing counts of the committed versions of the list, newest first; empty outside a git clone."""
    log = _git("log", "--format=%H", "-n", "20", "--", LIST)
    return [_counts(_git("show", f"{revision}:{LIST}")) for revision in log.split()]


def _counts(text: str) -> Mapping[str, int]:
    found = re.findall(r"^\[([\w.-]+)\]$.*?^known_missing = (\d+)$", text, re.MULTILINE | re.DOTALL)
    return {name: int(count) for name, count in found}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def main(arguments: list[str]) -> int:
    """Run the named suites, or all; 1 when one is not what the list says."""
    chosen = [suite for suite in suites() if not arguments or suite.name in arguments]
    failures = 0
    for suite in chosen:
        output = run_suite(suite)
        complaint = verdict(suite, output)
        failures += complaint is not None
        print(complaint or f"{suite.name}: {output.strip().splitlines()[-1]}, all of these known to be missing")
    return 1 if failures or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
