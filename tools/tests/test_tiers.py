from __future__ import annotations

import subprocess

import pytest

from tools.tiers import Tier, main, tiers
from tools.workspace import PACKAGES, ROOT


def test_the_test_command_covers_every_package():
    paths = tiers()["tests"].paths
    assert {f"{package.path}/tests" for package in PACKAGES} <= set(paths)


def test_there_are_the_three_kinds_of_tiers():
    assert {"tests", "nightly-1", "evidence"} <= set(tiers())
    assert all(tier.minutes <= 30 for tier in tiers().values() if tier.name != "evidence")
    assert tiers()["tests"].minutes <= 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tier", tiers().values(), ids=lambda tier: tier.name)
def test_no_tier_is_empty(tier: Tier):
    # `tests` contains this very test; the others are collected for real.
    if tier.name == "tests":
        assert all(list((ROOT / path).glob("test_*.py")) for path in tier.paths)
        return
    command = tier.pytest("--collect-only", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("::" in line for line in done.stdout.splitlines()), done.stdout


def test_an_unknown_tier_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["nigthly-1"]) == 2
    assert "usage" in capsys.readouterr().err
