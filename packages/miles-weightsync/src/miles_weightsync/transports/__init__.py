"""How buckets travel from the publisher to its engines."""

from __future__ import annotations

from miles_weightsync.config import WeightSyncConfig
from miles_weightsync.transports.protocol import Results, StagedBucket, Transport
from miles_weightsync.transports.shm import ShmTransport
from miles_weightsync.transports.tcp import TcpTransport

__all__ = ["Results", "ShmTransport", "StagedBucket", "TcpTransport", "Transport", "make_transport"]


def make_transport(config: WeightSyncConfig) -> Transport:
    """The transport that the configuration names. Raises MissingExtraError for gloo without torch."""
    if config.transport == "shm":
        return ShmTransport(config.receiver.shm_dir)
    if config.transport == "tcp":
        return TcpTransport()
    from miles_weightsync.transports.gloo import GlooTransport  # needs torch

    return GlooTransport(timeout_s=config.rpc.timeout_s)
