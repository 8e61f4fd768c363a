"""Sessions of the workspace: `nox -l` lists them. All use pip and the versions of constraints.txt."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the command `nox` does not, `python -m nox` does

from tools.tiers import tiers
from tools.workspace import PACKAGES, ROOT, Package, read_toml

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

GROUPS = read_toml("pyproject.toml")["dependency-groups"]
# One thread a process: the processes of the loop share the cores, and numbers must not depend on how many there are.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = ()) -> None:
    """Install requirements and dependency groups with the tested versions."""
    wanted = [*requirements, *(name for group in groups for name in GROUPS[group])]
    session.install("-c", "constraints.txt", *wanted)


def install_all(session: nox.Session, *, groups: tuple[str, ...] = ()) -> None:
    """Install every package, editable, and dependency groups."""
    session.install("-r", "requirements.txt", *(name for group in groups for name in GROUPS[group]))


def fetch_tokenizers(session: nox.Session) -> None:
    """Golden token vectors need the real tokenizer."""
    session.run("miles-tito", "tokenizers", "fetch", "qwen3")


def run_tests(session: nox.Session, folder: str) -> None:
    """Run the tests of one folder that belong to the test command."""
    marker = tiers()["tests"].marker
    session.run("python", "-m", "pytest", folder, "-m", marker, *session.posargs, env=ONE_THREAD)


def run_tier(session: nox.Session, name: str) -> None:
    """Run the tests of a tier of tools/tiers.toml within its time."""
    session.run("python", "-m", "tools.tiers", name, *session.posargs, env=ONE_THREAD)


@nox.session
def tests(session: nox.Session) -> None:
    """The test command of README and CI: all packages in one environment, tier `tests`."""
    install_all(session, groups=("test",))
    fetch_tokenizers(session)
    run_tier(session, "tests")


def _package_session(package: Package) -> Callable[[nox.Session], None]:
    def session_of_package(session: nox.Session) -> None:
        install(session, "-e", package.requirement, groups=("test",))
        if package.name == "miles-tito":
            fetch_tokenizers(session)
        run_tests(session, f"{package.path}/tests")

    session_of_package.__doc__ = f"The tests of {package.name}, with that package alone installed."
    return session_of_package


for _package in PACKAGES:
    if _package.name != "miles":
        nox.session(name=f"tests-{_package.name}")(_package_session(_package))


@nox.session(name="tests-miles")
def tests_miles(session: nox.Session) -> None:
    """The tests of the integration; it needs all packages."""
    install_all(session, groups=("test",))
    run_tests(session, "integration/tests")


def _tier_session(name: str) -> Callable[[nox.Session], None]:
    def session_of_tier(session: nox.Session) -> None:
        install_all(session, groups=("test",))
        run_tier(session, name)

    session_of_tier.__doc__ = f"Tier `{name}` of tools/tiers.toml."
    return session_of_tier


for _tier in tiers():
    if re.fullmatch(r"nightly-\d+|evidence", _tier):
        nox.session(name=_tier)(_tier_session(_tier))


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, and the checks of the workspace that need nothing installed."""
    install(session, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "-m", "tools.constraints", "--check")
    session.run("python", "-m", "tools.imports")
    session.run("python", "-m", "tools.hygiene")
    session.run("python", "-m", "tools.lengths")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on the source of every package and on the tools."""
    install_all(session, groups=("types",))
    for package in PACKAGES:
        session.run("mypy", "--strict", str(package.source.relative_to(ROOT)))
    session.run("mypy", "--strict", "--exclude", "^tools/tests/", "tools", "noxfile.py")


@nox.session
@nox.parametrize("package", [nox.param(package.name, id=package.name) for package in PACKAGES])
def wheels(session: nox.Session, package: str) -> None:
    """Build a package, install it alone in a clean environment, import it, ask its command for help."""
    session.run("python", "-m", "tools.wheels", package, session.create_tmp())


@nox.session
def quickstart(session: nox.Session) -> None:
    """The whole loop on the toy model."""
    install_all(session)
    session.run("miles", "quickstart", "--tiny", "--out", session.create_tmp(), *session.posargs, env=ONE_THREAD)


@nox.session
def docs(session: nox.Session) -> None:
    """Run every Python block of the documents."""
    install_all(session)
    session.run("python", "-m", "tools.readme", "blocks", env=ONE_THREAD)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks/*.py; each prints one JSON object a line."""
    install_all(session)
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        session.run("python", str(script.relative_to(ROOT)), *session.posargs, env=ONE_THREAD)
