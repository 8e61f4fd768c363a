"""`python -m tools.imports`: the star of packages. No leaf imports another member; nothing imports `tools`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.workspace import INTEGRATION, LEAVES, PACKAGES, ROOT, Package


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level name of each import in `source`, also of `import_module("name")` with a literal name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Call) and (name := _dynamic_import(node)):
            yield node.lineno, name.split(".")[0]


def _dynamic_import(call: ast.Call) -> str | None:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if function not in ("import_module", "__import__") or not call.args:
        return None
    name = call.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def forbidden(package: Package) -> frozenset[str]:
    """Import names that the code and the tests of `package` may not use."""
    if package is INTEGRATION:
        return frozenset({"tools"})
    return frozenset({"tools", *(other.module for other in PACKAGES if other is not package)})


def violations() -> Iterator[str]:
    """One line for each import that breaks the star."""
    for package in (*LEAVES, INTEGRATION):
        banned = forbidden(package)
        for file in sorted((ROOT / package.path).rglob("*.py")):
            for line, name in imported_modules(file.read_text(encoding="utf-8")):
                if name in banned:
                    yield f"{_relative(file)}:{line} imports {name}: connect the two in integration/src/miles/wiring"


def _relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def main() -> int:
    """Print the violations; 1 when there are any."""
    found = list(violations())
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
