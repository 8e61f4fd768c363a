"""The control endpoint: who may speak, what is refused, and the rules of a session over real connections."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from miles_weightsync import (
    AddressInUseError,
    AuthError,
    EngineReceiver,
    EngineUnreachableError,
    FrameError,
    LockError,
    ProtocolError,
    RawTensor,
    ReceiverSink,
    SessionError,
    WeightIdentityError,
    build_frame,
    manifest_of,
)
from miles_weightsync.frame import BucketHeader, make_table
from miles_weightsync.messages import TcpPayload
from miles_weightsync.testing import MemoryPort
from miles_weightsync.transports.tcp import send_frame


def _bucket(session: str, index: int, tensors: Mapping[str, RawTensor], version: int = 1) -> tuple[bytearray, str]:
    table, nbytes = make_table(list(tensors.items()))
    header = BucketHeader(session, str(version), str(version), index, "non_expert", "all", table, nbytes)
    frame = build_frame(header, list(tensors.items()))
    return frame, frame[-16:].hex()


@pytest.fixture
def halves(tensors: Mapping[str, RawTensor]) -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    names = sorted(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}


def _begin(sink: ReceiverSink, buckets: int, session: str = "s1") -> None:
    sink.acquire()
    sink.pause("retract")
    sink.begin(session, 1, buckets=buckets)


def test_the_address_is_loopback_and_real(start_engine: Callable[..., Any]) -> None:
    engine = start_engine()
    assert engine.address.startswith("127.0.0.1:")
    assert not engine.address.endswith(":0")
    assert engine.sink().describe().engine_id == "engine-0:1"


def test_a_port_in_use_is_one_clear_error(start_engine: Callable[..., Any], token: str) -> None:
    engine = start_engine()
    taken = int(engine.address.rpartition(":")[2])
    with pytest.raises(AddressInUseError, match="in use"):
        EngineReceiver(MemoryPort({}), port_number=taken, token=token).start()


def test_a_wrong_token_is_refused_and_touches_nothing(start_engine: Callable[..., Any]) -> None:
    engine = start_engine()
    for wrong in ("", "another", "a token of this tesu", "\ud800"):
        with pytest.raises(AuthError):
            ReceiverSink(engine.address, wrong).pause("abort")
    assert engine.port.calls == []


def test_nothing_listens(token: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    with pytest.raises(EngineUnreachableError, match=address):
        ReceiverSink(address, token).describe()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 2**31),
        struct.pack("<I", 70_000) + b"{}",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 5) + b"{not}",
        struct.pack("<I", 15) + b'{"op":"digests"',
        b"\x80\x04\x95pickle",
    ],
)
def test_noise_before_hello_closes_the_connection(start_engine: Callable[..., Any], noise: bytes) -> None:
    engine = start_engine(receiver={"hello_timeout_s": 0.3})
    host, port = engine.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(noise)
        received = b""
        try:
            while data := sock.recv(4096):
                received += data
        except ConnectionResetError:  # closed with our noise unread
            pass
    assert b"result" not in received
    assert engine.port.calls == []
    assert engine.sink().describe().state == "serving"


def test_an_unknown_request_is_answered_and_ends_the_connection(start_engine: Callable[..., Any]) -> None:
    sink = start_engine().sink()
    sink.connect()
    with pytest.raises(SessionError, match="op") as caught:
        sink._exchange({"op": "eval", "code": "1"}, "eval")
    assert caught.value.code == "protocol"


def test_a_silent_connection_is_dropped(start_engine: Callable[..., Any]) -> None:
    engine = start_engine(receiver={"hello_timeout_s": 0.2})
    host, port = engine.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        assert sock.recv(1) == b""


def test_a_session_over_tcp_frames(start_engine: Callable[..., Any], tensors: Any, halves: Any) -> None:
    engine = start_engine()
    sink = engine.sink()
    _begin(sink, 2)
    for index, half in enumerate(halves):
        frame, digest = _bucket("s1", index, half)
        assert send_frame(sink, index, digest, frame) == "apply"
        assert send_frame(sink, index, digest, frame) == "ignored", "a repeated bucket is not loaded again"
    assert engine.port.loads == 2
    manifest = manifest_of(1, tensors.items())
    assert sink.describe().version == 0, "the version changes at commit"
    assert sink.commit(1, manifest, "full") == "apply"
    assert sink.commit(1, manifest, "full") == "ignored"
    assert (sink.describe().version, sink.describe().manifest) == (1, manifest.digest)
    assert sink.digests() == manifest.digests()
    sink.resume()
    assert engine.port.state == "serving"


def test_late_reordered_and_changed_buckets_are_refused(start_engine: Callable[..., Any], halves: Any) -> None:
    engine = start_engine()
    sink = engine.sink()
    _begin(sink, 2)
    first, second = (_bucket("s1", index, half) for index, half in enumerate(halves))
    with pytest.raises(SessionError, match="was expected") as caught:
        send_frame(sink, 1, second[1], second[0])
    assert caught.value.code == "order"
    send_frame(sink, 0, first[1], first[0])
    with pytest.raises(SessionError) as caught:
        send_frame(sink, 0, second[1], second[0])
    assert caught.value.code == "conflict"
    with pytest.raises(SessionError) as caught:
        send_frame(sink, 1, first[1], first[0])
    assert caught.value.code == "conflict", "the frame says that it is another bucket"
    sink.abort()
    sink.begin("s2", 1, buckets=2)
    sink._session = "s1"
    with pytest.raises(SessionError) as caught:
        send_frame(sink, 1, second[1], second[0])
    assert caught.value.code == "no_session"
    assert engine.port.loads == 1


def test_the_token_of_a_publisher_that_lost_the_lock_is_fenced(start_engine: Callable[..., Any], halves: Any) -> None:
    engine = start_engine(receiver={"session_timeout_s": 1.0, "lock": {"lease_s": 60}})
    old, new = engine.sink(), engine.sink()
    _begin(old, 2)
    frame, digest = _bucket("s1", 0, halves[0])
    send_frame(old, 0, digest, frame)
    assert engine.port.poisoned.wait(10), "a session that falls silent is ended"
    _begin(new, 2, "s2")
    with pytest.raises(SessionError) as caught:
        send_frame(old, 1, digest, frame)
    assert caught.value.code == "fenced"
    assert new.describe().state == "updating", "the new session is untouched"


def test_one_publisher_holds_the_lock_at_a_time(start_engine: Callable[..., Any]) -> None:
    engine = start_engine()
    first, second = engine.sink(), engine.sink()
    assert first.acquire() == 1
    with pytest.raises(LockError) as caught:
        second.acquire()
    assert caught.value.code == "locked"
    first.release()
    assert second.acquire() == 2
    with pytest.raises(LockError, match="call acquire first"):
        first.begin("s1", 1, buckets=0)


def test_the_lock_of_a_publisher_that_left_is_free(
    start_engine: Callable[..., Any], wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    engine = start_engine()
    first, second = engine.sink(), engine.sink()
    first.acquire()
    first.close()

    def taken() -> bool:
        try:
            return second.acquire() == 2
        except LockError:
            return False

    wait_for(taken)


def test_a_damaged_payload_may_be_sent_again_once(start_engine: Callable[..., Any], tensors: Any) -> None:
    engine = start_engine()
    sink = engine.sink()
    _begin(sink, 1)
    frame, digest = _bucket("s1", 0, tensors)
    damaged = bytearray(frame)
    damaged[-17] ^= 1
    for state in ("updating", "poisoned"):
        with pytest.raises(SessionError) as caught:
            send_frame(sink, 0, digest, damaged)
        assert caught.value.code == "digest"
        assert sink.describe().state == state
    assert engine.port.loads == 0
    assert engine.port.state == "poisoned"


@pytest.mark.parametrize(
    ("prefix", "code"),
    [
        (b"MWB1" + struct.pack("<I", 64 * 1024 * 1024 + 1), "header_too_long"),
        (b"MWB2" + struct.pack("<I", 10), "magic"),
        (b"MWB1" + struct.pack("<I", 60 * 1024 * 1024), "truncated"),
    ],
)
def test_a_frame_is_judged_by_its_first_bytes(start_engine: Callable[..., Any], prefix: bytes, code: str) -> None:
    engine = start_engine()
    sink = engine.sink()
    _begin(sink, 1)
    assert sink.announce_bucket(0, "0" * 32, TcpPayload(frame_nbytes=1000)) == "ready"
    sink.send_bytes(prefix)
    with pytest.raises(FrameError) as caught:
        sink.finish_bucket()
    assert caught.value.code == code
    assert engine.sink().describe().state == "updating"


def test_a_frame_cut_by_a_lost_connection_changes_nothing(
    start_engine: Callable[..., Any], tensors: Any, wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    engine = start_engine(receiver={"session_timeout_s": 1.0})
    sink = engine.sink()
    _begin(sink, 1)
    frame, digest = _bucket("s1", 0, tensors)
    assert sink.announce_bucket(0, digest, TcpPayload(frame_nbytes=len(frame))) == "ready"
    sink.send_bytes(frame[: len(frame) // 2])
    sink.close()
    wait_for(lambda: sink.describe().state == "paused")
    assert (sink.describe().version, engine.port.loads) == (0, 0)


def test_a_bucket_larger_than_the_model_is_refused_unread(start_engine: Callable[..., Any]) -> None:
    engine = start_engine()
    sink = engine.sink()
    _begin(sink, 1)
    with pytest.raises(FrameError) as caught:
        sink.announce_bucket(0, "0" * 32, TcpPayload(frame_nbytes=2**40))
    assert caught.value.code == "out_of_range"


def test_an_engine_that_cannot_store_a_bucket_is_poisoned(start_engine: Callable[..., Any], tensors: Any) -> None:
    engine = start_engine(fail={"load": RuntimeError("out of memory")})
    sink = engine.sink()
    _begin(sink, 1)
    frame, digest = _bucket("s1", 0, tensors)
    with pytest.raises(SessionError, match="out of memory") as caught:
        send_frame(sink, 0, digest, frame)
    assert caught.value.code == "load"
    with pytest.raises(SessionError) as caught:
        sink.resume()
    assert caught.value.code == "poisoned"


def test_a_flipped_bit_in_what_is_stored_is_found_at_commit(start_engine: Callable[..., Any], tensors: Any) -> None:
    def flip(name: str, data: bytearray) -> None:
        if name == "model.norm.weight":
            data[3] ^= 0x01

    engine = start_engine(tamper=flip)
    sink = engine.sink()
    _begin(sink, 1)
    frame, digest = _bucket("s1", 0, tensors)
    send_frame(sink, 0, digest, frame)
    with pytest.raises(WeightIdentityError) as caught:
        sink.commit(1, manifest_of(1, tensors.items()), "full")
    assert caught.value.names == ("model.norm.weight",)
    assert "commit" not in engine.port.calls
    assert engine.port.state == "poisoned"
    assert sink.describe().version is None


def test_a_manifest_that_leaves_a_tensor_out_poisons(start_engine: Callable[..., Any], tensors: Any) -> None:
    engine = start_engine()
    sink = engine.sink()
    _begin(sink, 1)
    frame, digest = _bucket("s1", 0, tensors)
    send_frame(sink, 0, digest, frame)
    fewer = {name: tensor for name, tensor in tensors.items() if name != "model.scale"}
    with pytest.raises(SessionError, match=r"model\.scale"):
        sink.commit(1, manifest_of(1, fewer.items()), "full")
    assert engine.port.state == "poisoned"


def test_a_silent_session_before_its_first_bucket_leaves_the_old_version_whole(
    start_engine: Callable[..., Any], wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    engine = start_engine(receiver={"session_timeout_s": 0.2})
    sink = engine.sink()
    _begin(sink, 2)
    wait_for(lambda: sink.describe().state == "paused")
    assert sink.describe().version == 0
    assert engine.port.calls[-1] == "abort"
    sink.resume()
    assert engine.port.state == "serving"


def test_an_engine_of_a_later_epoch_serves_only_after_a_full_install(start_engine: Callable[..., Any]) -> None:
    later, told = start_engine(epoch=2), start_engine(epoch=2, stale=False)
    with pytest.raises(SessionError) as caught:
        later.sink().resume()
    assert caught.value.code == "stale"
    told.sink().resume()


def test_close_ends_waiting_connections(start_engine: Callable[..., Any]) -> None:
    engine = start_engine()
    sink = engine.sink()
    sink.describe()
    engine.receiver.close()
    with pytest.raises((EngineUnreachableError, ConnectionError)):
        sink.describe()


def test_connections_beyond_the_limit_are_closed(start_engine: Callable[..., Any]) -> None:
    engine = start_engine(receiver={"max_connections": 1})
    first = engine.sink()
    first.describe()
    with pytest.raises((ConnectionError, ProtocolError)):
        engine.sink().describe()
    assert first.describe().state == "serving"
