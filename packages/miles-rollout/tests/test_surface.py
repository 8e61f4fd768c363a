"""What the package offers, and the small parts that everything else stands on."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import miles_rollout
from miles_rollout import (
    Group,
    Member,
    RolloutConfig,
    chat_request_kwargs,
    check_agent,
    derive_seed,
    load_agent,
    member_seed,
)
from miles_rollout.config import BufferConfig, WorkerConfig
from miles_rollout.errors import PluginError, RolloutError
from miles_rollout.filters import FilterVerdict, judge, load_filter, no_aborted, nonzero_std
from miles_rollout.schedule import SubmissionSlots
from miles_rollout.testing import FakeTrajectory

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_is_there() -> None:
    for name in miles_rollout.__all__:
        assert getattr(miles_rollout, name) is not None
    assert {"RolloutWorker", "GroupBuffer", "Ledger", "create_router_app", "GraderPool"} <= set(dir(miles_rollout))
    with pytest.raises(AttributeError, match="Wroker"):
        getattr(miles_rollout, "Wroker")  # noqa: B009 - the point is the missing name


def test_the_core_imports_no_torch() -> None:
    code = (
        "import sys, miles_rollout as m\n"
        "for name in m.__all__: getattr(m, name)\n"
        "import miles_rollout.cli, miles_rollout.testing, miles_rollout.conformance\n"
        "print([name for name in ('torch', 'transformers', 'uvicorn') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_readmes_example_runs() -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    answer = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stdout) == (0, "['0', '1'] [1.0, 1.0]\n"), answer.stderr


def test_seeds_are_those_of_the_contract() -> None:
    first_bytes = hashlib.sha256(b"7\x1fp\x1f0\x1f1").digest()[:8]
    assert derive_seed(7, "p", 0, 1) == int.from_bytes(first_bytes, "little") % 2**63
    assert member_seed(7, "p", epoch=0, attempt=2, member=1) == derive_seed(7, "p", 2, 1)
    assert member_seed(7, "p", epoch=1, attempt=2, member=1) == derive_seed(derive_seed(7, "epoch", 1), "p", 2, 1)


def test_options_are_frozen_closed_and_checked_together() -> None:
    with pytest.raises(ValidationError, match="max_stalenes"):
        BufferConfig(max_stalenes=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"needs buffer\.max_staleness"):
        RolloutConfig(worker=WorkerConfig(staleness_policy="admit"), buffer=BufferConfig(max_staleness=None))
    with pytest.raises(ValidationError, match="rejects every group of one"):
        RolloutConfig(worker=WorkerConfig(group_size=1), buffer=BufferConfig(filter="nonzero_std"))
    with pytest.raises(ValidationError, match="raise the first to at least the second"):
        WorkerConfig(group_size=8, max_concurrent_samples=7)
    with pytest.raises(ValidationError, match="frozen"):
        RolloutConfig().buffer.max_staleness = 3  # type: ignore[misc]


def test_sampling_settings_are_renamed_for_chat() -> None:
    sampling: dict[str, Any] = {
        "max_new_tokens": 5, "max_tokens": 7, "min_new_tokens": 1, "sampling_seed": 3, "temperature": 0.0,
        "stop": None, "model": "x", "messages": [], "no_stop_trim": True,
    }  # fmt: skip
    assert chat_request_kwargs(sampling) == {"max_tokens": 7, "min_tokens": 1, "seed": 3, "temperature": 0.0}


def group(*rewards: float | None, status: str = "completed") -> Group:
    members = (Member((FakeTrajectory(),), status, reward, "ok", 0) for reward in rewards)  # type: ignore[arg-type]
    return Group("p", 0, 0, 0, tuple(members))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1, 1), "zero_std_1.0"), ((0.0, 0.0), "zero_std_0.0"), ((0.5,), "zero_std_0.5"), ((0.0, 1e-9), "zero_std_0.0")],
)
def test_equal_rewards_are_rejected_with_one_decimal(rewards: tuple[float, ...], reason: str) -> None:
    assert nonzero_std(group(*rewards)) == FilterVerdict(keep=False, reason=reason)


def test_differing_rewards_are_kept_and_bare_booleans_are_verdicts() -> None:
    assert nonzero_std(group(0.0, 1.0)).keep
    assert judge(group(1.0), lambda _: False) == FilterVerdict(keep=False)
    assert no_aborted(group(None, status="aborted")) == FilterVerdict(keep=False, reason="group_has_aborted")
    assert load_filter("miles_rollout.filters:no_aborted") is no_aborted


def test_an_agent_is_loaded_by_path_and_checked() -> None:
    with pytest.raises(PluginError, match="is not async: an agent is `async def run"):
        check_agent(lambda base_url, prompt, request_kwargs, metadata: None)
    with pytest.raises(PluginError, match="there is no agent named 'mine'"):
        load_agent("mine")
    with pytest.raises(PluginError, match="cannot be loaded"):
        load_agent("miles_rollout.nothing:run")


def test_sample_slots_take_a_group_when_any_four_members_have_ended() -> None:
    slots = SubmissionSlots(budget_groups=2, group_size=4, granularity="sample")
    for number in (0, 1):
        assert slots.room
        slots.open_group(number)
    for number in (0, 1, 0):
        assert not slots.room
        slots.close_member(number)
    slots.close_member(1)
    assert slots.room
    slots.open_group(2)
    assert (slots.groups, slots.samples) == (3, 8)
    slots.close_group(0)
    slots.close_member(0)
    assert slots.samples == 6


def test_group_slots_take_a_group_when_a_group_has_ended() -> None:
    slots = SubmissionSlots(budget_groups=1, group_size=4, granularity="group")
    slots.open_group(0)
    for _ in range(4):
        slots.close_member(0)
    assert not slots.room
    slots.close_group(0)
    assert slots.room


def test_a_member_with_several_trajectories_has_no_single_one() -> None:
    with pytest.raises(ValueError, match="look at `trajectories`"):
        _ = Member((), "aborted", None, "x", 0).trajectory


def test_all_errors_have_one_root() -> None:
    errors = [value for value in vars(miles_rollout.errors).values() if isinstance(value, type)]
    assert all(issubclass(error, RolloutError) for error in errors)
