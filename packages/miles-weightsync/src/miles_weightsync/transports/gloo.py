"""Broadcast over gloo: the source (rank 0) sends each payload once to a group of all engines.

The group stands alone: its own store on a socket that this process holds, a prefix for its name, nothing shared with a
trainer's default group. Each bucket's header goes ahead over the control connections; the collective starts when every
member has said that it is ready, so that a member that refuses never leaves the others waiting in it.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any

from miles_weightsync.errors import MissingExtraError, SessionError, TransportError, WeightSyncError
from miles_weightsync.fanout import fan_out
from miles_weightsync.frame import BucketHeader, build_frame, write_payload
from miles_weightsync.messages import GlooPayload, Join
from miles_weightsync.outgoing import Named
from miles_weightsync.policy import Delivery
from miles_weightsync.sink import ReceiverSink
from miles_weightsync.transports.protocol import Results, StagedBucket
from miles_weightsync.transports.tcp import send_frame

try:
    import torch
    import torch.distributed as dist
except ImportError:
    raise MissingExtraError("transport gloo needs torch: pip install 'miles-weightsync[torch]'") from None

_c10d: Any = dist
"""Stores and process groups as objects: torch has them in this module, its type stubs do not."""


class Group:
    """One process's place in a standalone gloo group."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int, timeout_s: float, host: str) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        self._group = _c10d.ProcessGroupGloo(_c10d.PrefixStore(name, store), rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send (rank 0) or receive a tensor of bytes. Raises TransportError when a member is gone or late."""
        if tensor.numel() == 0:
            return
        options = _c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._group.broadcast([tensor], options).wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"the broadcast broke: {error}") from None

    def receive(self, nbytes: int) -> memoryview:
        """Receive a broadcast into fresh memory."""
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.broadcast(tensor)
        return tensor.numpy().data if nbytes else memoryview(b"")


def join_group(request: Join) -> Group:
    """Join a group as a receiver. Raises SessionError (code `transport`) when it does not come together in time."""
    timeout = timedelta(seconds=request.timeout_s)
    try:
        store = _c10d.TCPStore(request.host, request.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return Group(store, request.group, request.rank, request.world_size, request.timeout_s, _own_host(request.host))
    except RuntimeError as error:
        raise SessionError("transport", f"broadcast group {request.group} did not come together: {error}") from None


def _own_host(peer: str) -> str:
    """This machine's address on the way to the peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


class GlooTransport:
    """Broadcasts from this process. A retry of one bucket for one engine goes over its control connection instead."""

    delivery: Delivery = "broadcast"

    def __init__(self, *, timeout_s: float = 120.0, host: str = "127.0.0.1") -> None:
        self._timeout_s = timeout_s
        self._host = host
        self._slots: list[torch.Tensor] = []
        self._group: Group | None = None
        self._members: tuple[tuple[str, int], ...] = ()
        self._name = ""

    def open(self, slot_nbytes: int) -> None:
        """Have two buffers of this size."""
        if not self._slots or self._slots[0].numel() < slot_nbytes:
            self._slots = [torch.empty(slot_nbytes, dtype=torch.uint8) for _ in range(2)]

    def stage(self, slot: int, header: BucketHeader, tensors: tuple[Named, ...]) -> StagedBucket:
        """Write the flat payload into a buffer."""
        flat = self._slots[slot][: header.payload_nbytes]
        view = flat.numpy().data if header.payload_nbytes else memoryview(bytearray())
        return StagedBucket(header, tensors, write_payload(header, tensors, view), flat)

    def connect(self, pool: Executor, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Build a group of the source and these engines, unless it stands already."""
        if self._group is not None and self._members == _membership(sinks):
            return dict.fromkeys(sinks, "apply")
        self._disband()
        self._name = f"miles-ws-{uuid.uuid4().hex[:12]}"
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        store = _c10d.TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listener.detach(),
        )
        return self._assemble(pool, store, port, sinks)

    def _assemble(self, pool: Executor, store: Any, port: int, sinks: Mapping[str, ReceiverSink]) -> Results:
        ranks = {key: rank for rank, key in enumerate(sinks, start=1)}
        world_size = 1 + len(sinks)

        def join(item: tuple[str, ReceiverSink]) -> str:
            key, sink = item
            sink.join(
                group=self._name,
                host=self._host,
                port=port,
                rank=ranks[key],
                world_size=world_size,
                timeout_s=self._timeout_s,
            )
            return "apply"

        own = pool.submit(self._join_as_source, store, world_size)
        results = fan_out(pool, {key: (key, sink) for key, sink in sinks.items()}, join)
        failure = own.result()
        if failure is not None:
            return {key: result if isinstance(result, WeightSyncError) else failure for key, result in results.items()}
        self._members = _membership(sinks)
        return results

    def _join_as_source(self, store: Any, world_size: int) -> SessionError | None:
        try:
            self._group = Group(store, self._name, 0, world_size, self._timeout_s, self._host)
        except RuntimeError as error:
            return SessionError("transport", f"broadcast group {self._name} did not come together: {error}")
        return None

    def deliver(self, pool: Executor, staged: StagedBucket, sinks: Mapping[str, ReceiverSink]) -> Results:
        """Announce, wait until all members are ready, broadcast, and collect the answers."""
        if len(sinks) == 1 and _membership(sinks) != self._members:
            return fan_out(pool, sinks, lambda sink: _send_alone(sink, staged))
        announced = self._announce(pool, staged, sinks)
        ready = {key: sinks[key] for key, answer in announced.items() if answer == "ready"}
        others = {key: answer for key, answer in announced.items() if key not in ready}
        if _membership(ready) != self._members:
            return {**others, **self._call_off(pool, staged, ready)}
        return self._broadcast(pool, staged, ready)

    def _announce(self, pool: Executor, staged: StagedBucket, sinks: Mapping[str, ReceiverSink]) -> Results:
        payload = GlooPayload(group=self._name, header=staged.header.to_json())
        return fan_out(pool, sinks, lambda sink: sink.announce_bucket(staged.header.bucket, staged.digest, payload))

    def _call_off(self, pool: Executor, staged: StagedBucket, ready: Mapping[str, ReceiverSink]) -> Results:
        """A member is missing: those that wait get the bucket on their own; the next builds a new group."""

        def redirect(sink: ReceiverSink) -> str:
            sink.proceed(go=False)
            try:
                sink.finish_bucket()
            except SessionError as error:
                if error.code != "transport":
                    raise
            return _send_alone(sink, staged)

        self._disband()
        return fan_out(pool, ready, redirect)

    def _broadcast(self, pool: Executor, staged: StagedBucket, ready: Mapping[str, ReceiverSink]) -> Results:
        assert self._group is not None
        going = fan_out(pool, ready, lambda sink: sink.proceed(go=True))
        try:
            self._group.broadcast(staged.place)
        except TransportError:
            self._disband()  # closes the connections that members still wait on
        waiting = {key: sink for key, sink in ready.items() if not isinstance(going[key], WeightSyncError)}
        answers = fan_out(pool, waiting, lambda sink: sink.finish_bucket())
        return {key: answers.get(key) or going[key] or TransportError("no answer came") for key in ready}

    def _disband(self) -> None:
        self._group = None
        self._members = ()

    def close(self) -> None:
        """Leave the group and drop the buffers."""
        self._disband()
        self._slots = []


def _membership(sinks: Mapping[str, ReceiverSink]) -> tuple[tuple[str, int], ...]:
    """Members by engine and connection: an engine that connected anew has left the group."""
    return tuple((key, sinks[key].generation) for key in sorted(sinks))


def _send_alone(sink: ReceiverSink, staged: StagedBucket) -> str:
    return send_frame(sink, staged.header.bucket, staged.digest, build_frame(staged.header, staged.tensors))
