"""The layout of the workspace: packages, tracked files, data tables."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Package:
    """A member of the workspace.

    Attributes:
        name: distribution name, also the name of its command.
        path: folder relative to the root.
        extras: extras that its tests need.
        torch_free: whether it installs, and imports, without torch.
    """

    name: str
    path: str
    extras: tuple[str, ...] = ()
    torch_free: bool = False

    @property
    def module(self) -> str:
        """Import name."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """Folder of the import package."""
        return ROOT / self.path / "src" / self.module

    @property
    def requirement(self) -> str:
        """What pip installs for its tests: path and extras."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"./{self.path}{extras}"


LEAVES = (
    Package("miles-tito", "packages/miles-tito", torch_free=True),
    Package("miles-rollout", "packages/miles-rollout", extras=("local",), torch_free=True),
    Package("miles-trainer", "packages/miles-trainer"),
    Package("miles-weightsync", "packages/miles-weightsync", extras=("torch",), torch_free=True),
    Package("miles-quant", "packages/miles-quant"),
    Package("miles-diffusion", "packages/miles-diffusion"),
)
INTEGRATION = Package("miles", "integration")
PACKAGES = (*LEAVES, INTEGRATION)


def read_toml(path: str) -> Mapping[str, Any]:
    """The content of a TOML file, `path` relative to the root."""
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


def tracked_files(pattern: str = "*") -> list[Path]:
    """Files that git tracks, or would track (new and not ignored), matching `pattern`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return [file for file in files if file.is_file()]
