"""`python -m tools.constraints [--check]`: constraints.txt for pip, from `[tool.uv] constraint-dependencies`.

One list of versions serves uv, which reads pyproject.toml, and pip, which reads constraints.txt. Index addresses are in
neither: where packages come from is the machine's business.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from tools.workspace import PACKAGES, ROOT, read_toml

TARGET = ROOT / "constraints.txt"
_HEADER = "# Written by `python -m tools.constraints` from [tool.uv] constraint-dependencies in pyproject.toml.\n"


def rendered() -> str:
    """What constraints.txt must hold."""
    pins = read_toml("pyproject.toml")["tool"]["uv"]["constraint-dependencies"]
    return _HEADER + "".join(f"{pin}\n" for pin in sorted(pins))


def unpinned() -> list[str]:
    """Names that a member or a dependency group asks for and that have no pin."""
    root = read_toml("pyproject.toml")
    pinned = {_name(pin) for pin in root["tool"]["uv"]["constraint-dependencies"]}
    asked = {_name(requirement) for group in root["dependency-groups"].values() for requirement in group}
    for package in PACKAGES:
        asked |= {_name(requirement) for requirement in _requirements(f"{package.path}/pyproject.toml")}
    return sorted(asked - pinned - {package.name for package in PACKAGES})


def _requirements(path: str) -> Iterable[str]:
    content = read_toml(path)
    yield from content["project"].get("dependencies", ())
    yield from content["build-system"]["requires"]
    for extra in content["project"].get("optional-dependencies", {}).values():
        yield from extra


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} does not start with a package name")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def main(arguments: list[str]) -> int:
    """Write the file, or with --check say whether it is up to date."""
    if missing := unpinned():
        print(f"without a pin in [tool.uv] constraint-dependencies: {', '.join(missing)}")
        return 1
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == rendered():
            return 0
        print("constraints.txt is not what pyproject.toml says: run `python -m tools.constraints`")
        return 1
    TARGET.write_text(rendered(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
