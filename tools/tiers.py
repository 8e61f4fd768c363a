"""`python -m tools.tiers TIER [PYTEST ARGUMENT...]`: run a tier of tools/tiers.toml within its time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from tools.workspace import ROOT, read_toml

_TIMED_OUT = 124


@dataclass(frozen=True, slots=True)
class Tier:
    """Tests that run together: what pytest collects, its marker expression, and the limit in minutes on 2 cores."""

    name: str
    paths: tuple[str, ...]
    marker: str
    minutes: int

    def pytest(self, *arguments: str) -> list[str]:
        """The command that runs the tier."""
        return [sys.executable, "-m", "pytest", *self.paths, "-m", self.marker, *arguments]


def tiers() -> dict[str, Tier]:
    """The tiers by name."""
    return {
        name: Tier(name, tuple(entry["paths"]), entry["marker"], entry["minutes"])
        for name, entry in read_toml("tools/tiers.toml").items()
    }


def main(arguments: list[str]) -> int:
    """Run one tier; pytest's exit code, or 124 when the time is up."""
    known = tiers()
    if not arguments or arguments[0] not in known:
        print(f"usage: python -m tools.tiers {'|'.join(known)} [PYTEST ARGUMENT...]", file=sys.stderr)
        return 2
    tier = known[arguments[0]]
    try:
        return subprocess.run(tier.pytest(*arguments[1:]), cwd=ROOT, check=False, timeout=tier.minutes * 60).returncode
    except subprocess.TimeoutExpired:
        print(
            f"tier {tier.name} ran past its {tier.minutes} minutes: find what became slow, or move it to another tier"
        )
        return _TIMED_OUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
