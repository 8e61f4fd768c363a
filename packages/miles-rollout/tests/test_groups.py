"""Group v1: the contract's files, round trips, and bytes that must be refused."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from miles_rollout import Group, Member, dumps_group, loads_group
from miles_rollout.errors import GroupFormatError
from miles_rollout.testing import FakeCodec, FakeTrajectory


class Raw:
    """Trajectories that are bytes already."""

    def dumps(self, trajectory: Any) -> bytes:
        assert isinstance(trajectory, bytes)
        return trajectory

    def loads(self, data: bytes) -> Any:
        return data


@pytest.fixture(scope="session")
def folder(contracts: Path) -> Path:
    return contracts / "group" / "v1"


def test_the_contracts_file_is_read_and_written_again_byte_for_byte(folder: Path) -> None:
    data = (folder / "group.safetensors").read_bytes()
    record = loads_group(data)
    expected = json.loads((folder / "group.json").read_text(encoding="utf-8"))
    assert record.members[0].trajectories == (bytes.fromhex(expected["trajectories"]["member.0.trajectory.0"]),)
    assert record.members[0].metadata == expected["header"]["members"][0]["metadata"]
    assert (record.prompt_id, record.group_id, record.epoch, record.attempt) == ("gsm8k/17", 42, 1, 2)
    assert (record.members[1].status, record.members[1].reward, record.members[1].seed) == ("aborted", None, 7)
    assert dumps_group(record.decode(Raw()), Raw()) == data


@pytest.mark.verifies("safetensors", "reads a group v1 file")
def test_any_safetensors_reader_reads_a_group(folder: Path) -> None:
    tensors = dict(deserialize((folder / "group.safetensors").read_bytes()))
    assert {name: bytes(entry["data"]) for name, entry in tensors.items()} == {
        "member.0.trajectory.0": b"first trajectory"
    }


def test_the_contracts_header_follows_its_schema(folder: Path) -> None:
    schema = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads((folder / "group.json").read_text(encoding="utf-8"))["header"], schema)


def test_every_broken_file_of_the_contract_is_refused(folder: Path) -> None:
    broken = json.loads((folder / "broken.json").read_text(encoding="utf-8"))
    assert len(broken) >= 20
    for case in broken:
        with pytest.raises(GroupFormatError):
            loads_group(bytes.fromhex(case["hex"]))


def test_a_claimed_size_is_not_allocated(folder: Path) -> None:
    case = next(c for c in json.loads((folder / "broken.json").read_text()) if c["fault"] == "offsets outside the file")
    tracemalloc.start()
    with pytest.raises(GroupFormatError):
        loads_group(bytes.fromhex(case["hex"]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_metadata_that_is_not_json_is_an_error_that_names_the_group() -> None:
    member = Member((), "completed", 1.0, "ok", 0, {"x": object()})
    with pytest.raises(GroupFormatError, match=r"group 3 \(prompt 'p'\) is not JSON"):
        dumps_group(Group("p", 3, 0, 0, (member,)), FakeCodec())


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(GroupFormatError):
        dumps_group(Group("p", 3, 0, 0, (Member((), "completed", math.nan, "ok", 0),)), FakeCodec())


trajectories = st.builds(
    FakeTrajectory,
    versions=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    n_tokens=st.integers(0, 99),
    reward=st.none() | st.floats(-9, 9),
)
members = st.builds(
    Member,
    trajectories=st.lists(trajectories, max_size=3).map(tuple),
    status=st.sampled_from(["completed", "truncated", "aborted", "failed"]),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    reason=st.text(max_size=20),
    seed=st.integers(0, 2**63 - 1),
    metadata=st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5)),
)
groups = st.builds(
    Group,
    prompt_id=st.text(min_size=1, max_size=9),
    group_id=st.integers(0, 9**9),
    epoch=st.integers(0, 99),
    attempt=st.integers(0, 9),
    members=st.lists(members, max_size=4).map(tuple),
)


@settings(max_examples=80, deadline=None)
@given(group=groups)
def test_round_trip(group: Group) -> None:
    data = dumps_group(group, FakeCodec())
    record = loads_group(data)
    assert dumps_group(record.decode(FakeCodec()), FakeCodec()) == data
    assert [member.oldest_version for member in record.decode(FakeCodec()).members] == [
        member.oldest_version for member in group.members
    ]


@settings(max_examples=150, deadline=None)
@given(group=groups, position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_damaged_bytes_are_refused_or_read_but_never_crash(group: Group, position: int, value: int, cut: int) -> None:
    data = bytearray(dumps_group(group, FakeCodec()))
    data[position % len(data)] = value
    try:
        loads_group(bytes(data[: len(data) - cut]))
    except GroupFormatError:
        return


@pytest.mark.parametrize("field", [{"status": []}, {"status": {}}, {"reward": 10**400}, {"reward": True}])
def test_a_header_of_wrong_types_is_refused(folder: Path, field: dict[str, Any]) -> None:
    data = (folder / "group.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    group = json.loads(header["__metadata__"]["group"])
    group["members"][0].update(field)
    header["__metadata__"]["group"] = json.dumps(group)
    text = json.dumps(header).encode()
    with pytest.raises(GroupFormatError, match=f"member 0 has the {next(iter(field))}"):
        loads_group(len(text).to_bytes(8, "little") + text + data[8 + length :])
