"""The publisher: one call installs the trainer's weights as a version on every engine, or says which failed and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from miles_weightsync.config import VerifyMode, WeightSyncConfig
from miles_weightsync.errors import (
    NameSetError,
    SessionError,
    TensorError,
    UpdateFailedError,
    WeightIdentityError,
    WeightSyncError,
    shown,
)
from miles_weightsync.fanout import fan_out
from miles_weightsync.fleet import SinkFleet
from miles_weightsync.guard import names_to_verify
from miles_weightsync.outgoing import Outgoing, collect, consume_only, plan_outgoing
from miles_weightsync.policy import UpdateOutcome, UpdatePlan, run_update
from miles_weightsync.protocols import Encoder, WeightSource
from miles_weightsync.report import EngineOutcome, UpdateEvent, UpdateReport, VerifyReport
from miles_weightsync.sink import ReceiverSink
from miles_weightsync.transports import Transport, make_transport


class WeightPublisher:
    """Publishes a trainer's weights to engines. One update at a time; the engines' locks keep other publishers out.

    The version is gathered whole, digested and checked against what the engines expect while they still serve. `rank`
    is this process's rank in the trainer; ranks that do not publish call `consume_only` once for each `publish` or
    `verify`.
    `transport` defaults to the one the configuration names. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        source: WeightSource,
        sinks: Sequence[ReceiverSink],
        *,
        transport: Transport | None = None,
        config: WeightSyncConfig | None = None,
        rank: int = 0,
        encoder: Encoder | None = None,
        on_event: Callable[[UpdateEvent], None] | None = None,
    ) -> None:
        self._config = config or WeightSyncConfig()
        self._source = source
        self._sinks = {sink.address: sink for sink in sinks}
        self._transport = transport
        self._rank = rank
        self._encoder = encoder
        self._on_event = on_event

    def set_sinks(self, sinks: Sequence[ReceiverSink]) -> None:
        """Publish to these engines from now on; those left out are disconnected."""
        kept = {sink.address: sink for sink in sinks}
        for address, sink in self._sinks.items():
            if kept.get(address) is not sink:
                sink.close()
        self._sinks = kept

    def publish(self, version: int) -> UpdateReport:
        """Install the source's weights as `version` and verify them; returns once the engines serve it.

        An engine that fails is left out, poisoned or stale; the others go on. Raises NameSetError or TensorError when
        the tensors are not those the engines expect (nothing is paused then), LockError, and when no engine is left
        WeightIdentityError if stored bytes differed, else UpdateFailedError.
        """
        start_s = time.perf_counter()
        outgoing, seconds = self._gather(version)
        self._require_sinks(version)
        with ThreadPoolExecutor(len(self._sinks) + 2, thread_name_prefix="weightsync") as pool:
            report = self._run(outgoing, pool, seconds, start_s)
        _raise_if_failed(report)
        return report

    def verify(self, version: int) -> VerifyReport:
        """Compare the source's weights with what every engine stores now, without an update.

        Raises WeightIdentityError naming engine and tensors, SessionError (code `version`) when an engine is at another
        version, NameSetError, TensorError.
        """
        start_s = time.perf_counter()
        outgoing, _ = self._gather(version)
        self._require_sinks(version)
        with ThreadPoolExecutor(len(self._sinks)) as pool:
            outcomes = fan_out(pool, self._sinks, lambda sink: _verify_engine(sink, outgoing))
        engines = []
        for outcome in outcomes.values():
            if isinstance(outcome, WeightSyncError):
                raise outcome
            engines.append(outcome)
        return VerifyReport(version, outgoing.manifest, tuple(engines), time.perf_counter() - start_s)

    def consume_only(self, rank: int | None = None) -> None:
        """Take part in the gather of one `publish` or `verify` that another rank does."""
        consume_only(self._source, self._rank if rank is None else rank)

    def close(self) -> None:
        """Disconnect from the engines and give back buffers and segments."""
        for sink in self._sinks.values():
            sink.close()
        if self._transport is not None:
            self._transport.close()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self, version: int) -> tuple[Outgoing, dict[str, float]]:
        start_s = time.perf_counter()
        tensors = collect(self._source, self._rank, self._encoder)
        gathered_s = time.perf_counter()
        outgoing = plan_outgoing(version, tensors, bucket_bytes=self._config.bucket_bytes, units=self._config.units)
        return outgoing, {"gather": gathered_s - start_s, "plan": time.perf_counter() - gathered_s}

    def _require_sinks(self, version: int) -> None:
        if not self._sinks:
            raise UpdateFailedError(f"version {version} has no engine to go to: give the publisher sinks", "", "lock")

    def _run(self, outgoing: Outgoing, pool: Executor, seconds: dict[str, float], start_s: float) -> UpdateReport:
        if self._transport is None:
            self._transport = make_transport(self._config)
        fleet = SinkFleet(outgoing, self._sinks, self._transport, self._config, pool)
        plan = UpdatePlan(
            delivery=self._transport.delivery,
            version=None,
            target=outgoing.version,
            engines=tuple(self._sinks),
            buckets=outgoing.labels,
            flush=self._config.pause_mode != "in_place",
        )
        outcome = run_update(fleet, plan, self._announcer(outgoing.version, start_s))
        seconds = seconds | fleet.seconds | {"total": time.perf_counter() - start_s}
        return _report(outgoing, outcome, fleet, seconds, self._config.verify)

    def _announcer(self, version: int, start_s: float) -> Callable[[str], None] | None:
        on_event = self._on_event
        if on_event is None:
            return None
        return lambda action: on_event(UpdateEvent(version, action, time.perf_counter() - start_s))


def _report(
    outgoing: Outgoing, outcome: UpdateOutcome, fleet: SinkFleet, seconds: dict[str, float], verify: VerifyMode
) -> UpdateReport:
    engines = tuple(_engine_outcome(key, outcome, fleet) for key in outcome.engines)
    return UpdateReport(
        version=outgoing.version,
        manifest=outgoing.manifest,
        outcome=outcome.outcome,
        engines=engines,
        tensors_verified=len(names_to_verify(outgoing.manifest, verify)) * sum(engine.in_router for engine in engines),
        seconds=seconds,
        wire_bytes=fleet.wire_bytes,
        buckets=len(outgoing.buckets),
        actions=outcome.actions,
    )


def _engine_outcome(key: str, outcome: UpdateOutcome, fleet: SinkFleet) -> EngineOutcome:
    fate, description = outcome.engines[key], fleet.descriptions.get(key)
    whole = fate.version
    if whole is None and fate.state in ("stale", "serving") and fate.phase != "preflight" and description is not None:
        whole = description.version  # it left before a byte landed: what it had is whole
    return EngineOutcome(
        engine_id=description.engine_id if description else key,
        address=key,
        state=fate.state,
        version=whole,
        phase=fate.phase,
        error=None if fate.state == "serving" and outcome.outcome != "failed" else fleet.errors.get(key),
    )


def _raise_if_failed(report: UpdateReport) -> None:
    """Raise what made the update fail, if it did."""
    if report.outcome != "failed":
        return
    errors = [engine.error for engine in report.engines if engine.error is not None]
    for error in errors:
        if isinstance(error, (NameSetError, TensorError, WeightIdentityError)):
            raise error
    first = next((engine for engine in report.engines if engine.error is not None), report.engines[0])
    states = ", ".join(f"{e.engine_id} {e.state} in {e.phase}: {e.error}" for e in report.engines if e.error)
    message = f"version {report.version} reached no engine ({states}): repair or restart the engines and publish again"
    raise UpdateFailedError(message, first.engine_id, first.phase) from first.error


def _verify_engine(sink: ReceiverSink, outgoing: Outgoing) -> str:
    sink.connect()
    description = sink.describe()
    outgoing.check_against(description.expected_tensors)
    if description.version != outgoing.version:
        raise SessionError(
            "version", f"engine {description.engine_id} is at version {description.version}, not {outgoing.version}"
        )
    stored, sent = sink.digests(), outgoing.manifest.digests()
    names = sorted(name for name, digest in sent.items() if stored.get(name) != digest)
    if names:
        raise WeightIdentityError(
            f"engine {description.engine_id} stores other bytes than the trainer holds for version "
            f"{outgoing.version} in {len(names)} of {len(sent)} tensors ({shown(names)})",
            names,
            description.engine_id,
        )
    return description.engine_id
