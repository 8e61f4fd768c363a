"""Running the server: take the port first, say which it is, drain on SIGTERM."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from miles_tito.errors import PortInUseError


def run_server(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    announce: Callable[[int], None] | None = None,
    *,
    drain_timeout_s: float = 30.0,
) -> None:
    """Serve `app` until SIGTERM or SIGINT, then let running requests finish for up to `drain_timeout_s`.

    `announce` gets the real port once it is taken (connections are queued from then on). Raises `PortInUseError`.
    """
    listener = bind(host, port)
    if announce is not None:
        announce(listener.getsockname()[1])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=max(1, round(drain_timeout_s))
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal again after it has drained; a drained server is a clean end, not a death by signal.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: None)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `PortInUseError` when the address is taken or cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} on {host} is in use: stop what listens there, or take a free port with --port 0"
            raise PortInUseError(text) from error
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", code="cannot_listen") from error
    return listener
