"""Trajectory v1 as bytes: lossless, strict, and bounded by the bytes at hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_tito import (
    CodecError,
    RoutedExperts,
    Trajectory,
    TrajectoryBatch,
    TrajectoryError,
    Turn,
    dumps,
    dumps_batch,
    loads,
    loads_batch,
)
from miles_tito.trajectory import expert_dtype, span_values, spans_of

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
Floats = st.floats(-50, 0, width=32)
Digests = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def turns(draw: st.DrawFn, start: int, with_trim: bool) -> Turn:
    gap, length = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    trimmed = draw(st.integers(0, 2)) if with_trim else 0
    total = length + trimmed
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=total, max_size=total)))
    spans = spans_of(np.asarray(versions, np.int64))
    return Turn(
        prompt_length=start + gap,
        completion_length=length,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        cached_tokens=draw(st.integers(0, 9)),
        version_start=versions[0] if versions else -1,
        version_end=versions[-1] if versions else -1,
        version_spans=spans,
        record_digest=draw(Digests),
        engine_id=draw(st.text(max_size=6)),
        started_s=draw(st.floats(0, 1e10)),
        ended_s=draw(st.floats(0, 1e10)),
        trimmed_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=trimmed, max_size=trimmed))),
        trimmed_logprobs=np.asarray(draw(st.lists(Floats, min_size=trimmed, max_size=trimmed)), np.float32),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    made: list[Turn] = []
    for _ in range(draw(st.integers(1, 3))):
        made.append(draw(turns(made[-1].end if made else 0, with_trim=True)))
    length = made[-1].end
    mask, versions = np.zeros(length, np.uint8), np.full(length, -1, np.int64)
    for turn in made:
        mask[turn.prompt_length : turn.end] = 1
        versions[turn.prompt_length : turn.end] = span_values(turn.version_spans, turn.completion_length)
    logprobs = np.asarray(draw(st.lists(Floats, min_size=length, max_size=length)), np.float32)
    return Trajectory(
        trajectory_id=draw(st.text(min_size=1, max_size=6)),
        session_id=draw(st.text(max_size=6)),
        family="smollm2",
        status=draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
        token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, logprobs, np.float32(0)).astype(np.float32),
        weight_version_spans=spans_of(versions),
        turns=tuple(made),
        messages=tuple(draw(st.lists(st.dictionaries(st.text(max_size=5), Json, max_size=3), max_size=3))),
        tools=draw(st.none() | st.just(({"type": "function"},))),
        routed_experts=draw(st.none() | experts(max(length - 1, 0))),
        reward=draw(st.none() | st.floats(-1e6, 1e6)),
        temperature=draw(st.floats(0.01, 5)),
        metadata=draw(st.dictionaries(st.text(max_size=5), Json, max_size=3)),
    )


@st.composite
def experts(draw: st.DrawFn, n_rows: int) -> RoutedExperts:
    count, layers, top_k = draw(st.sampled_from([4, 256, 257, 65537])), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    held = draw(st.integers(0, n_rows))
    size = held * layers * top_k
    values = draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
    rows = np.asarray(values, expert_dtype(count)).reshape(held, layers, top_k)
    missing = ((held, n_rows - held),) if held < n_rows else ()
    spans = spans_of(np.where(np.arange(n_rows) < held, 3, -1).astype(np.int64))
    return RoutedExperts(rows, tuple(range(layers)), count, top_k, missing, spans)


@pytest.fixture
def trajectory(contract: Path) -> Trajectory:
    return loads((contract / "trajectory.safetensors").read_bytes())


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_round_trip_is_lossless(trajectory: Trajectory) -> None:
    data = dumps(trajectory)
    back = loads(data)
    assert back == trajectory
    assert dumps(back) == data


@settings(max_examples=15, deadline=None)
@given(st.lists(trajectories(), max_size=3), st.none() | st.just("no_records"))
def test_containers_round_trip(items: list[Trajectory], reason: str | None) -> None:
    batch = TrajectoryBatch(tuple(items), reason)
    assert loads_batch(dumps_batch(batch)) == batch


@settings(max_examples=25, deadline=None)
@given(trajectories())
def test_headers_fit_the_published_schema(trajectory: Trajectory) -> None:
    root = Path(__file__).resolve().parents[3]
    schema = json.loads((root / "contracts/trajectory/v1/schema.json").read_text())
    jsonschema.validate(header_of(dumps(trajectory)), schema)


def test_the_golden_file_is_what_its_description_says(contract: Path, trajectory: Trajectory) -> None:
    described = json.loads((contract / "trajectory.json").read_text())
    data = (contract / described["file"]).read_bytes()
    assert header_of(data) == described["header"]
    assert dumps(trajectory) == data
    assert trajectory.token_ids.tolist() == described["arrays"]["token_ids"]["values"]
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.rows.tolist() == described["arrays"]["routed_experts"]["values"]
    assert trajectory.oldest_version == 3
    assert trajectory.with_reward(1).reward == 1.0


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    loaded: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["trajectory"])
    return loaded


def rewrite(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The same file with a changed outer header."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data[8 + length :]


def change_inner(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def apply(header: dict[str, Any]) -> None:
        inner = json.loads(header["__metadata__"]["trajectory"])
        change(inner)
        header["__metadata__"]["trajectory"] = json.dumps(inner)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["__metadata__"].update(version="2"), "version '2' is not known"),
        (lambda h: h["__metadata__"].update(format="other"), "not a trajectory"),
        (lambda h: h.pop("__metadata__"), "not a trajectory"),
        (lambda h: h["token_ids"].update(shape=[1 << 40]), "shape"),
        (lambda h: h["token_ids"].update(shape=[-1]), "shape"),
        (lambda h: h["token_ids"].update(dtype="F16"), "dtype"),
        (lambda h: h["token_ids"].update(data_offsets=[0, 1 << 60]), "takes bytes"),
        (lambda h: h["loss_mask"].update(data_offsets=[0, 14]), "takes bytes"),
        (lambda h: h.update(extra=h.pop("loss_mask")), "loss_mask"),
        (lambda h: h.pop("logprobs"), "takes bytes"),
        (change_inner(lambda i: i.pop("status")), "status"),
        (change_inner(lambda i: i.update(status="done")), "status"),
        (change_inner(lambda i: i.update(surprise=1)), "surprise"),
        (change_inner(lambda i: i.update(weight_version_spans=[[0]])), "spans"),
        (change_inner(lambda i: i["turns"][0].update(prompt_length="4")), "prompt_length"),
        (change_inner(lambda i: i["turns"][0].update(prompt_length=9)), "covers"),
        (change_inner(lambda i: i.update(turns=[])), "belong to no field"),
        (change_inner(lambda i: i.update(temperature=0)), "temperature"),
        (change_inner(lambda i: i.update(reward=True)), "reward"),
        (change_inner(lambda i: i.update(messages=["x"])), "messages"),
        (change_inner(lambda i: i["routed_experts"].update(num_experts=3)), "expert"),
    ],
)
def test_a_file_that_lies_is_refused(contract: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = (contract / "trajectory.safetensors").read_bytes()
    with pytest.raises(TrajectoryError, match=message):
        loads(rewrite(data, change))


def test_every_cut_of_a_file_is_refused(contract: Path) -> None:
    data = (contract / "trajectory.safetensors").read_bytes()
    for length in range(0, len(data), 37):
        with pytest.raises(CodecError):
            loads(data[:length])
    with pytest.raises(CodecError, match="belong to no tensor"):
        loads(data + b"\0")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a":NaN}',
        struct.pack("<Q", 13) + b'{"a":1,"a":2}',
        struct.pack("<Q", 20000) + b"[" * 20000,
    ],
)
def test_hostile_headers_are_refused_before_anything_is_allocated(data: bytes) -> None:
    with pytest.raises(CodecError):
        loads(data)


def test_nan_is_refused_both_ways(trajectory: Trajectory) -> None:
    logprobs = trajectory.logprobs.copy()
    logprobs[5] = np.nan
    with pytest.raises(TrajectoryError, match="NaN"):
        dumps(replace(trajectory, logprobs=logprobs))
    with pytest.raises(CodecError, match="JSON"):
        dumps(replace(trajectory, metadata={"x": float("nan")}))
    with pytest.raises(TrajectoryError, match="reward"):
        dumps(replace(trajectory, reward=float("inf")))


def test_containers_are_checked(trajectory: Trajectory) -> None:
    data = dumps_batch(TrajectoryBatch((trajectory,)))
    with pytest.raises(CodecError, match="magic"):
        loads_batch(b"XXXX" + data[4:])
    for length in (6, 20, len(data) - 1):
        with pytest.raises(CodecError):
            loads_batch(data[:length])
    with pytest.raises(CodecError, match="follow the last"):
        loads_batch(data + b"x")
    head = json.dumps({"count": 1 << 40, "empty_reason": None}).encode()
    with pytest.raises(CodecError, match="count"):
        loads_batch(b"MTC1" + struct.pack("<I", len(head)) + head)


def test_arrays_of_a_trajectory_cannot_be_written(trajectory: Trajectory) -> None:
    with pytest.raises(ValueError, match="read-only"):
        trajectory.token_ids[0] = 1
