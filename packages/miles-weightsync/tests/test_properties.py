"""Invariants of the pure functions, for any sizes and layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_weightsync import (
    BucketHeader,
    BucketItem,
    FrameError,
    RawTensor,
    TensorError,
    build_frame,
    layout,
    make_table,
    parse_frame,
    plan_buckets,
    plan_p2p,
    slice_table,
)
from miles_weightsync.delta import apply_delta, compress, decompress, encode_delta
from miles_weightsync.digest import digest_bytes, xxh3
from miles_weightsync.gather import merge_tp
from miles_weightsync.plan import EngineParameter, Part

SIZES = st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.sampled_from([None, "a", "b"])), max_size=30)


def _items(sizes: list[tuple[int, bool, str | None]]) -> list[BucketItem]:
    items = []
    for index, (nbytes, expert, unit) in enumerate(sizes):
        part = f"mlp.experts.{index}" if expert else f"attn.{index}"
        group = None if unit is None else f"{unit}{expert}"
        items.append(BucketItem(f"model.layers.{index % 5}.{part}.weight", nbytes, group))
    return items


@given(SIZES, st.integers(1, 500), st.sampled_from(["given", "canonical"]))
def test_buckets_hold_every_tensor_once_and_keep_units_whole(sizes: Any, capacity: int, order: Any) -> None:
    items = _items(sizes)
    buckets = plan_buckets(items, capacity, order=order)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    where = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    for unit in {item.unit for item in items} - {None}:
        assert len({where[i] for i, item in enumerate(items) if item.unit == unit}) == 1
    for bucket in buckets:
        units = {items[i].unit or i for i in bucket}
        assert sum(items[i].nbytes for i in bucket) <= capacity or len(units) == 1


@given(SIZES, st.integers(1, 500))
def test_buckets_without_units_keep_the_given_order_within_a_phase(sizes: Any, capacity: int) -> None:
    items = [BucketItem(item.name, item.nbytes) for item in _items(sizes)]
    flat = [index for bucket in plan_buckets(items, capacity) for index in bucket]
    experts = [i for i in flat if ".experts." in items[i].name]
    assert flat == sorted(set(flat) - set(experts)) + sorted(experts)


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_a_layout_is_aligned_ascending_and_tight(sizes: list[int]) -> None:
    offsets, total = layout(sizes)
    end = 0
    for offset, nbytes in zip(offsets, sizes, strict=True):
        assert offset % 256 == 0
        assert end <= offset < end + 256
        end = offset + nbytes
    assert total == end


TENSORS = st.lists(
    st.tuples(st.sampled_from(["U8", "BF16", "F32", "F8_E4M3"]), st.lists(st.integers(0, 5), max_size=3)), max_size=8
)


def _frame(specs: Any) -> tuple[bytearray, dict[str, RawTensor]]:
    tensors = {}
    for index, (dtype, shape) in enumerate(specs):
        item = {"U8": 1, "BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        data = np.random.default_rng(index).bytes(int(np.prod(shape, dtype=int)) * item)
        tensors[f"t.{index}"] = RawTensor(dtype, tuple(shape), memoryview(data))
    table, nbytes = make_table(list(tensors.items()))
    header = BucketHeader("s", "3", "2", 0, "non_expert", "all", table, nbytes)
    return build_frame(header, list(tensors.items())), tensors


@given(TENSORS)
def test_a_frame_brings_back_the_same_bytes(specs: Any) -> None:
    frame, tensors = _frame(specs)
    parsed = parse_frame(frame)
    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in parsed.tensors().items()} == {
        n: (t.dtype, t.shape, bytes(t.data)) for n, t in tensors.items()
    }
    assert xxh3(parsed.payload) == parsed.digest


@settings(max_examples=40)
@given(TENSORS, st.data())
def test_a_frame_cut_or_changed_anywhere_is_refused(specs: Any, data: Any) -> None:
    frame, _ = _frame(specs)
    with pytest.raises(FrameError):
        parse_frame(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(FrameError):
        parse_frame(frame + b"\0")
    place = data.draw(st.integers(max(0, len(frame) - 60), len(frame) - 1))
    frame[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((FrameError, TensorError)):
        parse_frame(frame)


@given(st.binary(max_size=2000))
def test_noise_is_never_more_than_a_typed_error(noise: bytes) -> None:
    for data in (noise, b"MWB1" + noise):
        with pytest.raises((FrameError, TensorError)):
            parse_frame(data)


PAIRS = st.integers(0, 400).flatmap(
    lambda n: st.tuples(st.binary(min_size=n, max_size=n), st.binary(min_size=n, max_size=n))
)


@given(PAIRS, st.sampled_from(["xor", "overwrite"]), st.sampled_from(["xxh3-128", "blake3", "adler32"]))
def test_a_delta_turns_old_into_new(pair: tuple[bytes, bytes], encoding: str, checksum: str) -> None:
    old, new = pair
    for target in (new, old, bytes(b ^ 0xFF for b in old)):
        stream = encode_delta(old, target, encoding)
        assert apply_delta(old, stream, encoding, digest_bytes(target, checksum), checksum) == target


@given(st.binary(max_size=3000))
def test_decompression_brings_back_at_most_the_declared_bytes(data: bytes) -> None:
    assert decompress(compress(data), len(data)) == data


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_a_plan_covers_each_target_once(sources: int, engines: int, ranks: int) -> None:
    plan = plan_p2p(sources, engines, ranks)
    assert len(plan) == sources
    targets = [target for row in plan for target in row]
    assert sorted(targets) == [(e, r) for e in range(engines) for r in range(ranks)]
    assert sources > len(targets) or all(plan)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1]), st.integers(1, 3), st.data())
def test_a_slice_table_cuts_what_a_tensor_parallel_engine_holds(
    ranks: int, rows: int, dim: int, columns: int, data: Any
) -> None:
    shape = (ranks * rows, ranks * columns)
    full = {name: np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) + k for k, name in enumerate(("gate", "up"))}
    parameter = EngineParameter("gate_up", "U8", tuple(Part(name, shape, dim) for name in full))
    rebuilt: dict[str, list[Any]] = {name: [] for name in full}
    for table in slice_table([parameter], ranks=ranks):
        row = table["gate_up"]
        held = np.zeros(row.nbytes, np.uint8)
        for cut in row.slices:
            source = full[cut.hf].reshape(-1)[cut.source_offset : cut.source_offset + cut.nbytes]
            held[cut.destination_offset : cut.destination_offset + cut.nbytes] = source
        for name, half in zip(full, np.split(held, 2), strict=True):
            local = (shape[0] // ranks, shape[1]) if dim == 0 else (shape[0], shape[1] // ranks)
            rebuilt[name].append(half.reshape(local))
    for name in full:
        assert np.array_equal(merge_tp(rebuilt[name], dim), full[name])
