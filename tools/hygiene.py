"""`python -m tools.hygiene`: tracked text names no folder of a machine and no host outside a short list.

A path or a package index that exists on one machine only breaks the clone of everybody else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tools.workspace import ROOT, tracked_files

_MACHINE_FOLDERS = ("work", "root", "home", "opt", "mnt", "Users")
_ABSOLUTE_PATH = re.compile(rf"(?<![\w./~-])/(?:{'|'.join(_MACHINE_FOLDERS)})/[\w.]")
_URL = re.compile(r"\b(?:https?|git|ssh)://[^\s\"'<>)\]`\\]+")
_BINARY_SUFFIXES = frozenset({".png", ".jpg", ".gif", ".ico", ".safetensors", ".bin", ".npz", ".woff2", ".gz"})

KNOWN_HOSTS = frozenset(
    {
        "127.0.0.1",
        "localhost",
        "0.0.0.0",
        "apache.org",
        "arxiv.org",
        "developercertificate.org",
        "doi.org",
        "github.com",
        "huggingface.co",
        "json-schema.org",
        "keepachangelog.com",
        "semver.org",
        "w3.org",
    }
)
_RESERVED = (".invalid", ".example", ".test", "example.com", "example.org")


def findings_in(text: str) -> Iterator[tuple[int, str]]:
    """Line number and complaint for each machine folder and each unknown host in `text`."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _ABSOLUTE_PATH.search(line):
            yield number, f"names a folder of a machine ({match.group()}...): make it relative or an argument"
        for url in _URL.findall(line):
            if not _known(url):
                yield (
                    number,
                    f"names the host of {url}: leave it out, or add the host to tools/hygiene.py if it is a source",
                )


def _known(url: str) -> bool:
    try:
        host = (urlsplit(url).hostname or "").removeprefix("www.")
    except ValueError:
        return True  # not an address but text about one, such as http://[
    templated = not host or any(mark in host for mark in "{}$%*[]…")
    return templated or "." not in host or host in KNOWN_HOSTS or host.endswith(_RESERVED)


def findings() -> Iterator[str]:
    """One line for each finding in a tracked text file."""
    for file in tracked_files():
        if file.suffix in _BINARY_SUFFIXES:
            continue
        for number, complaint in findings_in(_text(file)):
            yield f"{file.relative_to(ROOT).as_posix()}:{number} {complaint}"


def _text(file: Path) -> str:
    return file.read_bytes().decode("utf-8", errors="replace")


def main() -> int:
    """Print the findings; 1 when there are any."""
    found = list(findings())
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
