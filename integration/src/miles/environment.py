"""What a run ran on. No host name, no user, no folder of the machine."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("miles", "miles-tito", "miles-rollout", "miles-trainer", "miles-weightsync", "miles-quant", "miles-diffusion"),
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "openai", "httpx", "starlette"),
    *("uvicorn", "rich", "matplotlib"),
)
CPU_INFO = Path("/proc/cpuinfo")


def environment() -> dict[str, Any]:
    """Python, system, processor, cores this process may use, and the versions of the packages that matter."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_process": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name)) is not None},
    }


def write_environment(path: Path) -> None:
    """Write it as JSON."""
    path.write_text(json.dumps(environment(), indent=2) + "\n")


def installed_version(package: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            name, found, value = line.partition(":")
            if found and name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
