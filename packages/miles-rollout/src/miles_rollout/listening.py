"""Taking a port before a server is built, so that its address is known and a taken port is one clear error."""

from __future__ import annotations

import socket

from miles_rollout.errors import PortInUseError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises PortInUseError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0") from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """The URL of a listening socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
