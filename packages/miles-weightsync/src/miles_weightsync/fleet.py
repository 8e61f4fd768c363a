"""The live fleet: each step of an update carried out on real engines, and its errors turned into verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from miles_weightsync.bucket import align
from miles_weightsync.config import WeightSyncConfig
from miles_weightsync.errors import (
    EngineUnreachableError,
    LockError,
    RpcTimeoutError,
    SessionError,
    TransportError,
    WeightSyncError,
)
from miles_weightsync.fanout import fan_out
from miles_weightsync.frame import TRAILER_NBYTES, frame_prefix
from miles_weightsync.outgoing import Outgoing, new_session
from miles_weightsync.policy import Verdict, Verdicts
from miles_weightsync.sink import ReceiverSink, RemoteDescription
from miles_weightsync.transports.protocol import StagedBucket, Transport

_GONE = (TransportError, RpcTimeoutError, EngineUnreachableError)
_NOT_OURS = ("fenced", "no_session", "session_open")
_LOCK_RETRY_S = 0.1
_FLUSH_RETRY_S = 0.05


class SinkFleet:
    """Engines behind sinks, keyed by address. One instance carries one update."""

    def __init__(
        self,
        outgoing: Outgoing,
        sinks: Mapping[str, ReceiverSink],
        transport: Transport,
        config: WeightSyncConfig,
        pool: Executor,
    ) -> None:
        self._outgoing = outgoing
        self._sinks = dict(sinks)
        self._transport = transport
        self._config = config
        self._pool = pool
        self._indices = {label: index for index, label in enumerate(outgoing.labels)}
        self._session = ""
        self._staged: dict[int, Future[StagedBucket]] = {}
        self._in_session: set[str] = set()
        self.descriptions: dict[str, RemoteDescription] = {}
        self.errors: dict[str, WeightSyncError] = {}
        self.seconds: dict[str, float] = {}
        self.wire_bytes = 0

    def lock(self) -> None:
        """Take the lock of every engine that answers. Raises LockError when another publisher keeps one, AuthError."""
        with self._timed("lock"):
            for key, sink in sorted(self._sinks.items()):
                try:
                    sink.connect()
                    self._acquire(sink)
                except _GONE as error:
                    self.errors[key] = error
                except WeightSyncError:
                    self._release()
                    raise

    def preflight(self, engines: Sequence[str]) -> Verdicts:
        """Ask every engine what it expects and compare; nothing is paused yet."""
        with self._timed("preflight"):
            asked = [engine for engine in engines if engine not in self.errors]
            verdicts: dict[str, Verdict] = dict.fromkeys(engines, "unreachable")
            return verdicts | self._on(asked, self._check, gone="unreachable", refused="incompatible")

    def transfer(self, engines: Sequence[str]) -> Verdicts:
        """Nothing: these transports send bytes in buckets."""
        return dict.fromkeys(engines, "ok")

    def load(self, engines: Sequence[str]) -> Verdicts:
        """Nothing: these transports send bytes in buckets."""
        return dict.fromkeys(engines, "ok")

    def pause(self, engines: Sequence[str]) -> Verdicts:
        """Stop all engines and wait for all."""
        with self._timed("pause"):
            return self._on(engines, lambda sink: sink.pause(self._config.pause_mode), refused="kept")

    def flush(self, engines: Sequence[str]) -> Verdicts:
        """Drop prefix caches, trying again while an engine is busy."""
        with self._timed("flush"):
            return self._on(engines, self._flush, refused="kept")

    def begin(self, engines: Sequence[str]) -> Verdicts:
        """Open a session of one name on all engines."""
        with self._timed("begin"):
            self._discard_staged()
            self._session = new_session(self._outgoing.version)
            self._transport.open(self._slot_nbytes())
            verdicts = self._on(engines, self._begin, refused="kept")
            self._in_session = {engine for engine, verdict in verdicts.items() if verdict == "ok"}
            return verdicts

    def bucket(self, label: str, engines: Sequence[str]) -> Verdicts:
        """Send one bucket to all engines while the next is staged."""
        with self._timed("bucket"):
            index = self._indices[label]
            staged = self._take_staged(index)
            self._stage(index + 1)
            sinks = {engine: self._sinks[engine] for engine in engines}
            connected = self._transport.connect(self._pool, sinks)
            broken = {key: error for key, error in connected.items() if isinstance(error, WeightSyncError)}
            if broken:
                return {engine: self._bucket_verdict(engine, broken.get(engine)) for engine in engines}
            return self._deliver(staged, sinks)

    def retry(self, label: str, engine: str) -> Verdict:
        """Send a damaged bucket to one engine again; it is still staged."""
        with self._timed("bucket"):
            staged = self._staged[self._indices[label]].result()
            return self._deliver(staged, {engine: self._sinks[engine]})[engine]

    def barrier(self) -> None:
        """Every engine has answered for every bucket so far: there is nothing left to wait for."""

    def abort(self, engines: Sequence[str]) -> Verdicts:
        """End the session on the engines that are left; it starts anew."""
        with self._timed("abort"):
            self._abort(engines)
            return dict.fromkeys(engines, "ok")

    def rebuild(self, engines: Sequence[str]) -> Verdicts:
        """The group of a broadcast is built anew when its first bucket is sent."""
        return dict.fromkeys(engines, "ok")

    def commit(self, engines: Sequence[str]) -> Verdicts:
        """Have every engine verify what it stores and take the version."""
        with self._timed("commit"):
            manifest, verify = self._outgoing.manifest, self._config.verify
            verdicts = self._on(
                engines, lambda sink: sink.commit(manifest.version, manifest, verify), gone="lost", refused="refused"
            )
            self._in_session -= {engine for engine, verdict in verdicts.items() if verdict == "ok"}
            return {engine: self._unless_dead(engine, verdict) for engine, verdict in verdicts.items()}

    def describe(self, engine: str) -> bool:
        """Whether an engine whose answer was lost has committed: its version and manifest digest decide."""
        try:
            description = self._sinks[engine].describe()
        except WeightSyncError as error:
            self.errors[engine] = error
            return False
        manifest = self._outgoing.manifest
        committed = (description.version, description.manifest) == (manifest.version, manifest.digest)
        if committed:
            self.errors.pop(engine, None)
        else:
            self._quarantine(engine, self.errors[engine])
        return committed

    def resume(self, engines: Sequence[str]) -> Verdicts:
        """Let the engines that committed generate again."""
        with self._timed("resume"):
            return self._on(engines, lambda sink: sink.resume(), refused="refused")

    def unlock(self) -> None:
        """Close what is still open and give all locks back."""
        with self._timed("unlock"):
            self._discard_staged()
            self._abort([key for key in self._in_session if not isinstance(self.errors.get(key), _GONE)])
            self._release()

    def _abort(self, engines: Sequence[str]) -> None:
        """Best effort: an engine that cannot be told ends the session by its own deadline."""
        fan_out(self._pool, {engine: self._sinks[engine] for engine in engines}, lambda sink: sink.abort())
        self._in_session -= set(engines)

    def _acquire(self, sink: ReceiverSink) -> None:
        give_up_s = time.monotonic() + self._config.rpc.lock_wait_s
        while True:
            try:
                sink.acquire()
                return
            except LockError:
                if time.monotonic() >= give_up_s:
                    raise
            time.sleep(_LOCK_RETRY_S)

    def _release(self) -> None:
        for sink in self._sinks.values():
            try:
                sink.release()
            except WeightSyncError:  # the engine is gone or has freed it: either way it is not held
                sink.close()

    def _check(self, sink: ReceiverSink) -> None:
        description = sink.describe()
        self.descriptions[sink.address] = description
        self._outgoing.check_against(description.expected_tensors)

    def _flush(self, sink: ReceiverSink) -> None:
        give_up_s = time.monotonic() + self._config.rpc.flush_timeout_s
        while True:
            try:
                sink.flush()
                return
            except SessionError:
                if time.monotonic() >= give_up_s:
                    raise
            time.sleep(_FLUSH_RETRY_S)

    def _begin(self, sink: ReceiverSink) -> None:
        sink.begin(self._session, self._outgoing.version, buckets=len(self._indices))

    def _slot_nbytes(self) -> int:
        headers = (self._outgoing.header(index, self._session) for index in self._indices.values())
        frames = (len(frame_prefix(header)) + header.payload_nbytes + TRAILER_NBYTES for header in headers)
        return align(max(frames, default=1), 4096)

    def _stage(self, index: int) -> None:
        """Start copying a bucket into the slot that the bucket before the last one has left."""
        if index >= len(self._indices) or index in self._staged:
            return
        self._staged.pop(index - 2, None)
        header = self._outgoing.header(index, self._session)
        tensors = self._outgoing.buckets[index]
        self._staged[index] = self._pool.submit(self._transport.stage, index % 2, header, tensors)

    def _take_staged(self, index: int) -> StagedBucket:
        self._stage(index)
        return self._staged[index].result()

    def _discard_staged(self) -> None:
        for future in self._staged.values():
            future.exception()
        self._staged = {}

    def _deliver(self, staged: StagedBucket, sinks: Mapping[str, ReceiverSink]) -> dict[str, Verdict]:
        together = self._transport.delivery == "broadcast"
        self.wire_bytes += staged.header.payload_nbytes * (1 if together else len(sinks))
        results = self._transport.deliver(self._pool, staged, sinks)
        return {key: self._bucket_verdict(key, result) for key, result in results.items()}

    def _bucket_verdict(self, engine: str, result: object) -> Verdict:
        if not isinstance(result, WeightSyncError):
            return (
                "corrupt" if result is None else "ok"
            )  # None: the group did not form, though not because of this engine
        if isinstance(result, SessionError) and result.code in ("digest", "transport"):
            self.errors[engine] = result
            return "corrupt"
        return self._judge(engine, result, gone="died", refused="refused")

    def _unless_dead(self, engine: str, verdict: Verdict) -> Verdict:
        """A lost answer of an engine that takes no connection any more is a dead engine."""
        if verdict != "lost":
            return verdict
        try:
            self._sinks[engine].connect()
        except WeightSyncError as error:
            self.errors[engine] = error
            return "died"
        return "lost"

    def _on(
        self,
        engines: Sequence[str],
        call: Callable[[ReceiverSink], Any],
        *,
        gone: Verdict = "died",
        refused: Verdict,
    ) -> dict[str, Verdict]:
        """Call all engines at once; an error is kept and judged."""
        outcomes = fan_out(self._pool, {engine: self._sinks[engine] for engine in engines}, call)
        return {
            engine: self._judge(engine, outcome, gone=gone, refused=refused)
            if isinstance(outcome, WeightSyncError)
            else "ok"
            for engine, outcome in outcomes.items()
        }

    def _judge(self, engine: str, error: WeightSyncError, *, gone: Verdict, refused: Verdict) -> Verdict:
        self.errors[engine] = error
        if isinstance(error, _GONE):
            return gone
        if refused == "refused":
            self._quarantine(engine, error)
        return refused

    def _quarantine(self, engine: str, error: WeightSyncError) -> None:
        """Make sure that an engine which failed after bytes may have landed does not serve."""
        self._in_session.discard(engine)
        if error.code in _NOT_OURS:
            return
        try:
            self._sinks[engine].poison(str(error))
        except WeightSyncError:  # its own deadline does it then
            self._sinks[engine].close()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start_s
