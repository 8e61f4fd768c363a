"""How a role process meets its runtime: settings from standard input, one announcement, an end when the driver ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

DRAIN_S = 4.0

Settings = TypeVar("Settings", bound="RoleSettings")


class RoleSettings(BaseModel):
    """What every role is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    token: str


def announce(ready: Mapping[str, Any]) -> None:
    """Tell the runtime that this role is ready. Nobody reads on: what is printed later goes to the log."""
    print(json.dumps(dict(ready)), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def run_role(settings_type: type[Settings], main: Callable[[Settings], None]) -> None:
    """Read settings, run `main`, and report a failure to start as one announcement instead of a trace."""
    settings = settings_type.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_driver, name="driver-watch", daemon=True).start()
    try:
        main(settings)
    except Exception as error:
        announce({"error": {"code": getattr(error, "code", type(error).__name__), "message": str(error)}})
        raise


def _end_with_driver() -> None:
    """End this process, gracefully and then not, when the driver closes our standard input."""
    # not through sys.stdin, whose lock this thread would hold when the interpreter ends: that is a fatal error
    while os.read(0, 65536):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(DRAIN_S)
    os._exit(1)
