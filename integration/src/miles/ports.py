"""Ports on this machine."""

from __future__ import annotations

import socket


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket; port 0 takes any free one."""
    listener = socket.create_server((host, port))
    listener.set_inheritable(False)
    return listener


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, for libraries that insist on a number (torch's rendezvous)."""
    with listen(host) as listener:
        return int(listener.getsockname()[1])
