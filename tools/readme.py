"""Commands and code blocks of the documents.

`python -m tools.readme command tests` prints the command that README.md marks with `<!-- command: tests -->`, so that
CI and the reader run one and the same. `python -m tools.readme blocks` runs every Python block of the documents.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, tracked_files

_FENCE = "```"
_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A Python block of a document: file, line of its first statement, text."""

    file: Path
    line: int
    code: str

    @property
    def where(self) -> str:
        """File and line, relative to the root."""
        return f"{self.file.relative_to(ROOT).as_posix()}:{self.line}"


def command(name: str, text: str) -> str | None:
    """The lines of the code block that follows the mark of `name` in a document; None without one."""
    _, found, after = text.partition(f"<!-- command: {name} -->\n")
    lines = after.splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith(_FENCE)]
    if not found or len(fences) < 2:
        return None
    return "\n".join(lines[fences[0] + 1 : fences[1]]) or None


def blocks() -> Iterator[Block]:
    """The Python blocks of every tracked Markdown file."""
    for file in tracked_files("*.md"):
        text = file.read_text(encoding="utf-8")
        for match in _PYTHON_BLOCK.finditer(text):
            yield Block(file, text.count("\n", 0, match.start(1)) + 1, match.group(1))


def run_block(block: Block, *, timeout_s: float = 120) -> str | None:
    """Run a block in a folder of its own; what it wrote to standard error when it failed, else None."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "error::SyntaxWarning", "-c", block.code],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    return None if done.returncode == 0 else done.stderr


def main(arguments: list[str]) -> int:
    """Print a command, or run the blocks; 1 when it is not there or one fails."""
    match arguments:
        case ["command", name]:
            found = command(name, (ROOT / "README.md").read_text(encoding="utf-8"))
            print(found if found else f"README.md marks no command: {name}", file=sys.stdout if found else sys.stderr)
            return 0 if found else 1
        case ["blocks"]:
            return _run_blocks()
        case _:
            print("usage: python -m tools.readme command NAME | blocks", file=sys.stderr)
            return 2


def _run_blocks() -> int:
    failures = count = 0
    for block in blocks():
        complaint = run_block(block)
        count += 1
        failures += complaint is not None
        if complaint:
            print(f"{block.where}\n{complaint}")
    print(f"{count - failures} passed, {failures} failed")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
