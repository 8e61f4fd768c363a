"""The router as a process."""

from __future__ import annotations

from miles.roles.process import RoleSettings, announce, run_role
from miles_rollout.config import RouterConfig
from miles_rollout.router import run_router


class RouterSettings(RoleSettings):
    """What the router is told."""

    control_token: str
    router: RouterConfig
    workers: tuple[str, ...]


def main(settings: RouterSettings) -> None:
    """Serve until the driver ends."""
    config = settings.router.model_copy(update={"workers": settings.workers})
    run_router(config, control_token=settings.control_token, announce=announce)


if __name__ == "__main__":
    run_role(RouterSettings, main)
