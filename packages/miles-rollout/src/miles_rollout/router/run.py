"""The router as a process: socket first, then one line that says where it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing

from miles_rollout.config import RouterConfig
from miles_rollout.errors import RolloutConfigError
from miles_rollout.listening import bind, url_of
from miles_rollout.router.app import create_router_app
from miles_rollout.router.fleet import check_url

Announce = Callable[[Mapping[str, object]], None]


def print_announcement(announcement: Mapping[str, object]) -> None:
    """Write the announcement as one JSON line to standard output."""
    sys.stdout.write(json.dumps(dict(announcement)) + "\n")
    sys.stdout.flush()


def run_router(
    config: RouterConfig, *, control_token: str | None = None, announce: Announce = print_announcement
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` receives `{"event": "ready", "url", "host", "port"}`.

    Raises:
        PortInUseError: the port is taken.
        RolloutConfigError: a worker URL is none.
    """
    import uvicorn  # heavy, and of no use to those who only mount the application

    try:
        for url in config.workers:
            check_url(url)
    except ValueError as error:
        raise RolloutConfigError(f"router.workers: {error}") from error
    with closing(bind(config.host, config.port)) as listener:
        app = create_router_app(config, control_token=control_token)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        url = url_of(config.host, listener)
        announce({"event": "ready", "url": url, "host": config.host, "port": listener.getsockname()[1]})
        uvicorn.Server(settings).run(sockets=[listener])
