"""Where roles run. One small protocol; `local` places them in processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.rpc import RoleClient

__all__ = ["Role", "RoleSpec", "Runtime"]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A role to start: `kind` is a module of `miles.roles`; `settings` is JSON."""

    kind: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Role(Protocol):
    """A running role."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> Mapping[str, Any]:
        """What the role announced: addresses and identity."""
        ...

    def client(self) -> RoleClient:
        """A client of the role's calls (roles that answer calls announce a `call_port`)."""
        ...

    def check_alive(self) -> None:
        """Raise `RoleDiedError` with the end of the role's log when it has ended."""
        ...


class Runtime(Protocol):
    """Starts roles and ends them in reverse order."""

    async def start(self, spec: RoleSpec) -> Role:
        """Start a role and wait until it is ready. Raises `RoleError` with the role's own message."""
        ...

    async def aclose(self) -> None:
        """End all roles, the last started first. Leaves no process behind."""
        ...
