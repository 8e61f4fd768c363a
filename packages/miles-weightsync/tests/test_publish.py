"""Publishing to engines of this process: every transport, every way a step can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_weightsync import (
    AuthError,
    LockError,
    NameSetError,
    RawTensor,
    ReceiverSink,
    SessionError,
    TensorError,
    TransportError,
    UpdateFailedError,
    WeightIdentityError,
    WeightPublisher,
    WeightSyncConfig,
    as_wire,
    consume_only,
)
from miles_weightsync.protocols import WireTensor
from miles_weightsync.testing import ArraySource

CONFIG: Mapping[str, Any] = {"bucket_bytes": 8000, "rpc": {"timeout_s": 10, "lock_wait_s": 0, "flush_timeout_s": 0}}
TRANSPORTS = ("shm", "tcp", "gloo")


@pytest.fixture
def publish_to(arrays: Mapping[str, Any], tmp_path: Path) -> Iterator[Callable[..., WeightPublisher]]:
    with ExitStack() as stack:

        def make(engines: Sequence[Any], *, source: Any = None, encoder: Any = None, **config: Any) -> WeightPublisher:
            return stack.enter_context(
                WeightPublisher(
                    source or ArraySource(arrays, per_unit=3),
                    [engine.sink() for engine in engines],
                    config=WeightSyncConfig(**(CONFIG | config)),
                    encoder=encoder,
                )
            )

        yield make


def _bytes(tensors: Mapping[str, RawTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_store_what_the_trainer_holds(
    transport: str, start_engine: Any, publish_to: Any, arrays: Any, tensors: Any
) -> None:
    engines = [start_engine(engine_id=f"e{i}:1") for i in range(2)]
    publisher = publish_to(engines, transport=transport)
    first = publisher.publish(1)
    arrays["model.norm.weight"][:] = 2.0
    second = publisher.publish(2)
    assert (first.outcome, second.outcome, second.engines_ok, second.engines_poisoned) == ("ok", "ok", 2, 0)
    assert first.digest != second.digest
    for engine in engines:
        assert engine.port.stored() == _bytes(tensors)
        assert (engine.port.version, engine.port.digest, engine.port.state) == (2, second.digest, "serving")
    sent = sum(tensor.nbytes for tensor in tensors.values())
    assert second.wire_bytes >= sent * (1 if transport == "gloo" else 2)
    assert second.buckets == first.buckets > 3


def test_steps_come_in_their_order(start_engine: Any, publish_to: Any) -> None:
    engine = start_engine()
    report = publish_to([engine]).publish(1)
    buckets = [action for action in report.actions if action.startswith("bucket")]
    assert report.actions == (
        *("lock", "preflight", "pause", "flush", "begin"),
        *(bucket for bucket in buckets if " n" in bucket),
        "barrier",
        *(bucket for bucket in buckets if " x" in bucket),
        *("commit", "resume", "unlock"),
    )
    calls = ["pause retract", "flush", "begin", *["load"] * len(buckets), "commit", "resume"]
    assert engine.port.calls == calls
    assert set(report.seconds) >= {"gather", "pause", "bucket", "commit", "total"}


def test_in_place_keeps_the_cache(start_engine: Any, publish_to: Any) -> None:
    engine = start_engine()
    publish_to([engine], pause_mode="in_place").publish(1)
    assert engine.port.calls[:2] == ["pause in_place", "begin"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_engine_that_fails_a_bucket_is_poisoned_and_the_other_goes_on(
    transport: str, start_engine: Any, publish_to: Any, tensors: Any
) -> None:
    class FailsSecond(dict[str, Exception]):
        """Raises at the second load only."""

        seen = 0

        def get(self, name: str, default: Any = None) -> Any:
            self.seen += name == "load"
            return RuntimeError("no memory") if name == "load" and self.seen == 2 else default

    good, bad = start_engine(engine_id="good"), start_engine(engine_id="bad", fail=FailsSecond())
    publisher = publish_to([bad, good], transport=transport)
    report = publisher.publish(1)
    states = {engine.engine_id: (engine.state, engine.version, engine.in_router) for engine in report.engines}
    assert report.outcome == "partial"
    assert states == {"good": ("serving", 1, True), "bad": ("poisoned", None, False)}
    assert "no memory" in str(next(e.error for e in report.engines if e.engine_id == "bad"))
    assert good.port.stored() == _bytes(tensors)
    assert (bad.port.state, bad.port.calls.count("load"), bad.port.loads) == ("poisoned", 2, 1)
    assert "resume" not in bad.port.calls
    healed = publisher.publish(2)
    assert healed.outcome == "ok", "a full install heals"
    assert bad.port.stored() == _bytes(tensors)


def _flip(name: str, data: bytearray) -> None:
    if name.endswith("experts.1.up_proj.weight"):
        data[-1] ^= 0x80


def test_one_flipped_bit_in_the_only_engine_is_an_identity_error(start_engine: Any, publish_to: Any) -> None:
    engine = start_engine(tamper=_flip)
    with pytest.raises(WeightIdentityError) as caught:
        publish_to([engine]).publish(1)
    assert caught.value.names == tuple(f"model.layers.{i}.mlp.experts.1.up_proj.weight" for i in range(2))
    assert "2 of 14 tensors" in str(caught.value)
    assert engine.port.state == "poisoned"
    assert "resume" not in engine.port.calls


def test_one_flipped_bit_in_one_of_two_engines_is_reported(start_engine: Any, publish_to: Any) -> None:
    good, bad = start_engine(engine_id="good"), start_engine(engine_id="bad", tamper=_flip)
    report = publish_to([good, bad]).publish(1)
    (error,) = report.identity_errors
    assert (report.outcome, len(error.names)) == ("partial", 2)
    assert (good.port.state, bad.port.state) == ("serving", "poisoned")


def test_probe_looks_at_norms_and_off_at_nothing(start_engine: Any, publish_to: Any) -> None:
    def flip_norm(name: str, data: bytearray) -> None:
        if "norm" in name:
            data[0] ^= 1

    with pytest.raises(WeightIdentityError):
        publish_to([start_engine(tamper=flip_norm)], verify="probe").publish(1)
    assert publish_to([start_engine(tamper=flip_norm)], verify="off").publish(1).outcome == "ok"


def test_names_are_compared_before_anything_is_paused(start_engine: Any, publish_to: Any, arrays: Any) -> None:
    sent = [
        (name, as_wire(array)) for name, array in arrays.items() if name not in ("model.scale", "model.norm.weight")
    ]
    sent += [("model.surplus", sent[0][1]), sent[1], sent[2]]

    class Source:
        def units(self, rank: int) -> Any:
            yield sent

    engine = start_engine()
    with pytest.raises(NameSetError) as caught:
        publish_to([engine], source=Source()).publish(1)
    assert caught.value.by_kind() == {
        "missing": ("model.norm.weight", "model.scale"),
        "extra": ("model.surplus",),
        "duplicate": tuple(sorted([sent[1][0], sent[2][0]])),
    }
    assert engine.port.calls == []
    assert engine.port.state == "serving"


@pytest.mark.parametrize(("change", "code"), [(np.ones(48, np.float16), "dtype"), (np.ones((1, 48), "f4"), "shape")])
def test_dtypes_and_shapes_are_compared_before_anything_is_paused(
    change: Any, code: str, start_engine: Any, publish_to: Any, arrays: Any
) -> None:
    engine = start_engine()
    arrays["model.norm.weight"] = change
    with pytest.raises(TensorError, match=r"model\.norm\.weight") as caught:
        publish_to([engine]).publish(1)
    assert (caught.value.code, engine.port.calls) == (code, [])


def test_an_engine_that_does_not_answer_is_left_out(start_engine: Any, publish_to: Any) -> None:
    gone, there = start_engine(), start_engine()
    publisher = publish_to([gone, there])
    gone.receiver.close()
    report = publisher.publish(1)
    assert [engine.state for engine in report.engines] == ["stale", "serving"]
    assert report.engines[0].phase == "preflight"


def test_without_any_engine_the_update_fails_naming_engine_and_phase(start_engine: Any, publish_to: Any) -> None:
    engine = start_engine()
    publisher = publish_to([engine])
    engine.receiver.close()
    with pytest.raises(UpdateFailedError, match="preflight") as caught:
        publisher.publish(1)
    assert (":" in caught.value.engine, caught.value.phase) == (True, "preflight")
    with pytest.raises(UpdateFailedError, match="no engine to go to"):
        publish_to([]).publish(1)


@pytest.mark.parametrize("step", ["pause", "flush", "begin"])
def test_a_failure_before_the_first_byte_leaves_the_old_version(step: str, start_engine: Any, publish_to: Any) -> None:
    bad, good = start_engine(fail={step: RuntimeError("busy")}, engine_id="bad"), start_engine()
    report = publish_to([bad, good]).publish(1)
    outcome = report.engines[0]
    assert (outcome.state, outcome.version, outcome.phase, outcome.in_router) == ("stale", 0, step, False)
    assert (bad.port.version, bad.port.loads, good.port.version) == (0, 0, 1)


def test_an_engine_that_never_answers_is_dead_by_its_deadline(start_engine: Any, arrays: Any, token: str) -> None:
    class Deaf(dict[str, Exception]):
        """Blocks in pause until the test is over."""

        over = threading.Event()

        def get(self, name: str, default: Any = None) -> Any:
            if name == "pause":
                self.over.wait(30)
            return default

    deaf, good = start_engine(fail=Deaf()), start_engine()
    sinks = [ReceiverSink(deaf.address, token, timeout_s=1.5), good.sink()]
    with WeightPublisher(ArraySource(arrays), sinks, config=WeightSyncConfig(**CONFIG)) as publisher:
        report = publisher.publish(1)
    Deaf.over.set()
    assert [(engine.state, engine.phase) for engine in report.engines] == [("dead", "pause"), ("serving", "")]
    assert "no answer within 1.5 s" in str(report.engines[0].error)


@pytest.mark.parametrize(("step", "state"), [("commit", "poisoned"), ("resume", "poisoned")])
def test_a_failure_at_the_end_takes_the_engine_out(step: str, state: str, start_engine: Any, publish_to: Any) -> None:
    bad, good = start_engine(fail={step: RuntimeError("broken")}), start_engine()
    report = publish_to([bad, good]).publish(1)
    assert [engine.state for engine in report.engines] == [state, "serving"]
    assert bad.port.state == "poisoned"


def test_a_wrong_token_stops_the_update(start_engine: Any, arrays: Any) -> None:
    engine = start_engine()
    sink = ReceiverSink(engine.address, "wrong")
    with WeightPublisher(ArraySource(arrays), [sink]) as publisher, pytest.raises(AuthError):
        publisher.publish(1)
    assert engine.port.calls == []


def test_two_publishers_never_update_at_the_same_time(start_engine: Any, publish_to: Any) -> None:
    engines = [start_engine(), start_engine()]
    other = engines[1].sink()
    other.acquire()
    publisher = publish_to(engines)
    with pytest.raises(LockError) as caught:
        publisher.publish(1)
    assert caught.value.code == "locked"
    assert [engine.port.calls for engine in engines] == [[], []]
    engines[0].sink().acquire()  # what the failed update had taken is free again
    other.release()


def test_a_publisher_waits_for_the_lock(start_engine: Any, publish_to: Any) -> None:
    engine = start_engine(receiver={"lock": {"lease_s": 1.5}})
    engine.sink().acquire()
    rpc = {"timeout_s": 10, "lock_wait_s": 10}
    assert publish_to([engine], rpc=rpc).publish(1).outcome == "ok"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_commit_answer_is_settled_by_describe(
    transport: str, start_engine: Any, lossy: Any, arrays: Any, token: str
) -> None:
    engine = start_engine()
    proxy = lossy(engine.address, b'"op":"commit"')
    config = WeightSyncConfig(**(CONFIG | {"transport": transport}))
    sink = ReceiverSink(proxy.address, token, timeout_s=10)
    with WeightPublisher(ArraySource(arrays), [sink], config=config) as publisher:
        report = publisher.publish(1)
    assert proxy.lost.is_set()
    assert f"describe {proxy.address}" in report.actions
    assert (report.outcome, engine.port.state, engine.port.version) == ("ok", "serving", 1)


def test_a_lost_commit_answer_of_a_failed_commit_poisons(
    start_engine: Any, lossy: Any, arrays: Any, token: str
) -> None:
    engine = start_engine(tamper=_flip)
    proxy = lossy(engine.address, b'"op":"commit"')
    sink = ReceiverSink(proxy.address, token, timeout_s=10)
    publisher = WeightPublisher(ArraySource(arrays), [sink], config=WeightSyncConfig(**CONFIG))
    with publisher, pytest.raises(UpdateFailedError) as caught:
        publisher.publish(1)
    assert caught.value.phase == "commit"
    assert engine.port.state == "poisoned"


def test_verify_compares_without_an_update(start_engine: Any, publish_to: Any, arrays: Any) -> None:
    engine = start_engine()
    publisher = publish_to([engine])
    with pytest.raises(WeightIdentityError, match="version 0"):
        publisher.verify(0)
    report = publisher.publish(1)
    verified = publisher.verify(1)
    assert (verified.digest, verified.engines) == (report.digest, ("engine-0:1",))
    arrays["model.norm.weight"][5] = -1.0
    with pytest.raises(WeightIdentityError) as caught:
        publisher.verify(1)
    assert caught.value.names == ("model.norm.weight",)
    with pytest.raises(SessionError, match="at version 1, not 2"):
        publisher.verify(2)
    assert engine.port.state == "serving"


def test_events_tell_each_step(start_engine: Any, arrays: Any) -> None:
    seen: list[str] = []
    engine = start_engine()
    config = WeightSyncConfig(**CONFIG)
    source = ArraySource(arrays)
    with WeightPublisher(
        source, [engine.sink()], config=config, on_event=lambda event: seen.append(event.action)
    ) as publisher:
        assert tuple(seen) == ()
        assert publisher.publish(1).actions == tuple(seen)


class Halver:
    """An encoder that stores float32 as float16 beside a scale."""

    def encode(self, name: str, tensor: WireTensor) -> Mapping[str, RawTensor]:
        if tensor.dtype != "F32":
            return {name: as_wire(tensor)}
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape).astype(np.float16)
        return {name: as_wire(values), f"{name}_scale": as_wire(np.ones((), np.float32))}


def test_an_encoder_decides_what_is_stored(start_engine: Any, publish_to: Any) -> None:
    weight = np.arange(8, dtype=np.float32).reshape(2, 4)
    stored = dict(Halver().encode("a.weight", as_wire(weight)))
    engine = start_engine(tensors=stored)
    publish_to([engine], source=ArraySource({"a.weight": weight}), encoder=Halver()).publish(1)
    assert engine.port.stored() == {name: bytes(tensor.data) for name, tensor in stored.items()}


def test_a_source_is_consumed_to_its_end_even_when_encoding_fails(publish_to: Any) -> None:
    source = ArraySource({"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)})

    class Fails:
        def encode(self, name: str, tensor: WireTensor) -> Mapping[str, RawTensor]:
            raise TensorError("dtype", f"{name} cannot be encoded")

    with pytest.raises(TensorError, match="a cannot be encoded"):
        publish_to([], source=source, encoder=Fails()).publish(1)
    assert source.passes == 1


def test_a_source_is_consumed_once_an_update_on_every_rank(start_engine: Any, publish_to: Any, arrays: Any) -> None:
    source, other_rank = ArraySource(arrays), ArraySource(arrays)
    publisher = publish_to([start_engine()], source=source)
    publisher.publish(1)
    publisher.verify(1)
    consume_only(other_rank, 1)
    WeightPublisher(other_rank, [], rank=1).consume_only()
    assert source.passes == other_rank.passes == 2


def test_engines_can_be_replaced_between_updates(start_engine: Any, publish_to: Any) -> None:
    old, new = start_engine(), start_engine(epoch=2)
    publisher = publish_to([old], transport="gloo")
    publisher.publish(1)
    publisher.set_sinks([new.sink()])
    publisher.publish(2)
    assert (old.port.version, new.port.version) == (1, 2)


def test_no_segment_outlives_its_publisher(start_engine: Any, arrays: Any, tmp_path: Path) -> None:
    engine = start_engine(receiver={"shm_dir": tmp_path})
    config = WeightSyncConfig(**(CONFIG | {"receiver": {"shm_dir": tmp_path}}))
    with WeightPublisher(ArraySource(arrays), [engine.sink()], config=config) as publisher:
        publisher.publish(1)
        names = sorted(path.name for path in tmp_path.iterdir())
        publisher.publish(2)
        assert sorted(path.name for path in tmp_path.iterdir()) == names, "two segments are reused"
        assert len(names) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_cannot_see_the_segment_is_poisoned_not_served(
    start_engine: Any, publish_to: Any, tmp_path: Path
) -> None:
    engine = start_engine(receiver={"shm_dir": tmp_path})
    with pytest.raises(UpdateFailedError, match="cannot be opened") as caught:
        publish_to([engine]).publish(1)
    assert isinstance(caught.value.__cause__, (SessionError, TransportError))
    assert engine.port.loads == 0
