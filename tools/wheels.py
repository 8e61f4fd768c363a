"""`python -m tools.wheels PACKAGE FOLDER`: build, install and try one package alone, as a stranger would.

Run in a clean environment. First-party names are resolved from FOLDER only: until the packages are published, anybody
could own those names on the public index, so an installation that took one from elsewhere fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tools.workspace import INTEGRATION, PACKAGES, ROOT, Package

_FIRST_PARTY = frozenset(package.name for package in PACKAGES)


class WheelError(RuntimeError):
    """A wheel that a stranger could not use."""


def build(packages: Iterable[Package], folder: Path) -> dict[str, Path]:
    """Build a wheel of each package into `folder`; distribution name to wheel."""
    built = {}
    for package in packages:
        pip("wheel", "-q", "--no-deps", "-w", str(folder), f"./{package.path}")
        (built[package.name],) = folder.glob(f"{package.module}-*.whl")
    return built


def check_contents(package: Package, wheel: Path) -> None:
    """Raise unless the wheel ships types, licence and the import package, and nothing beside them."""
    names = zipfile.ZipFile(wheel).namelist()
    wanted = (f"{package.module}/__init__.py", f"{package.module}/py.typed")
    missing = [name for name in wanted if name not in names]
    missing += [] if any(name.endswith("/licenses/LICENSE") for name in names) else ["LICENSE"]
    foreign = sorted({name.split("/")[0] for name in names} - {package.module} - _metadata_folders(names))
    if missing or foreign:
        raise WheelError(f"{wheel.name}: missing {missing}, not its own {foreign}")


def _metadata_folders(names: Sequence[str]) -> set[str]:
    return {folder for name in names if (folder := name.split("/")[0]).endswith(".dist-info")}


def install(package: Package, wheels: Mapping[str, Path], folder: Path) -> list[str]:
    """Install the package's wheel (for the integration: all wheels); names that came with it.

    Raises:
        WheelError: a first-party name came from elsewhere, or a leaf brought another leaf.
    """
    report = folder / "report.json"
    given = wheels.values() if package is INTEGRATION else [wheels[package.name]]
    pip("install", "-q", "--no-compile", "-c", "constraints.txt", "--report", str(report), *map(str, given))
    installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    for item in installed:
        require_own(package, item, folder)
    return [str(item["metadata"]["name"]).lower() for item in installed]


def require_own(package: Package, item: Mapping[str, Any], folder: Path) -> None:
    """Check one item of pip's installation report.

    Raises:
        WheelError: it is a first-party name from elsewhere than `folder`, or another leaf that a leaf brought.
    """
    name, address = item["metadata"]["name"], urlsplit(item["download_info"]["url"])
    if name not in _FIRST_PARTY:
        return
    if address.scheme != "file" or Path(unquote(address.path)).parent != folder:
        raise WheelError(f"{name} came from {item['download_info']['url']}, not from {folder}")
    if package is not INTEGRATION and name != package.name:
        raise WheelError(f"{package.name} brought {name}: a leaf needs no other leaf")


def try_out(package: Package, installed: Sequence[str]) -> None:
    """Import the package and ask its command for help, away from the source tree; neither may load torch.

    Raises:
        WheelError: one of them fails, or torch came with a package that is free of it.
    """
    if package.torch_free and "torch" in installed:
        raise WheelError(f"{package.name} installs torch: move what needs it to an extra")
    run_away_from_source([sys.executable, "-c", f"import sys, {package.module}; assert 'torch' not in sys.modules"])
    help_text = run_away_from_source([str(Path(sys.executable).parent / package.name), "--help"])
    if "Usage" not in help_text:
        raise WheelError(f"{package.name} --help printed no usage:\n{help_text}")


def run_away_from_source(command: Sequence[str]) -> str:
    """Run a command in an empty folder and give its output.

    Raises:
        WheelError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    if done.returncode != 0:
        raise WheelError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def pip(*arguments: str) -> None:
    """Run pip of this environment in the root folder."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=ROOT, check=True)


def main(arguments: list[str]) -> int:
    """Check one package; 1 with the reason when a stranger could not use it."""
    name, folder = arguments[0], Path(arguments[1]).resolve()
    package = next(package for package in PACKAGES if package.name == name)
    try:
        wheels = build(PACKAGES if package is INTEGRATION else [package], folder)
        check_contents(package, wheels[name])
        try_out(package, install(package, wheels, folder))
    except WheelError as error:
        print(error)
        return 1
    print(f"{name}: built, installed alone, imported, --help")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
