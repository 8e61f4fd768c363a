"""A pytest plugin: which genuine package each test met, in which version, and how the test ended.

A test says so itself: `@pytest.mark.verifies("openai", "its client talks to the session server unchanged")`. The
version is that of the installed distribution, or the mark's `version` for what is none. `--verified FILE` writes the
results, from which `python -m tools.verified FILE` writes docs/verified.md.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

Result = dict[str, Any]
_RESULTS = pytest.StashKey[dict[tuple[str, str, str], Result]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --verified."""
    parser.addoption("--verified", metavar="FILE", help="write what tests marked `verifies` met, and how they ended")


def pytest_configure(config: pytest.Config) -> None:
    """Start with no result."""
    config.stash[_RESULTS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the outcome of a marked test: that of its call, or of the phase that failed or skipped."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for mark in item.iter_markers("verifies"):
            package, claim = mark.args
            version = mark.kwargs.get("version") or _installed(package)
            result = {"package": package, "version": version, "claim": claim}
            item.config.stash[_RESULTS][item.nodeid, package, claim] = {
                **result,
                "test": item.nodeid,
                "outcome": report.outcome,
            }
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the results where --verified says."""
    file = session.config.getoption("--verified")
    if file:
        results = sorted(session.config.stash[_RESULTS].values(), key=lambda result: str(result["test"]))
        Path(file).write_text(json.dumps({"where": where(), "results": results}, indent=2) + "\n", encoding="utf-8")


def where() -> str:
    """System, Python and accelerator; no name of a machine."""
    torch = sys.modules.get("torch")
    device = torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else "no GPU"
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{platform.system()} {platform.machine()}, {python}, {device}"


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
