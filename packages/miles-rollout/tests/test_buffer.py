"""The buffer: order, capacity, the three drop reasons, and that nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rollout import Drop, DropReason, Group, GroupBuffer, Member
from miles_rollout.config import BufferConfig
from miles_rollout.errors import PluginError
from miles_rollout.testing import FakeTrajectory, run_virtual


def group(number: int, *versions: int, status: str = "completed", rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    trajectories = [FakeTrajectory(versions, "completed", reward=reward) for reward in rewards]
    members = tuple(Member((part,), status, part.reward, "ok", 0) for part in trajectories)  # type: ignore[arg-type]
    return Group(f"p{number}", number, 0, 0, members)


class Rig:
    def __init__(self, *, batch_groups: int = 2, oldest_first: bool = False, **config: object) -> None:
        self.version: int | None = 0
        self.dropped: list[tuple[int, DropReason]] = []
        self.accepted: list[int] = []
        self.buffer = GroupBuffer(
            BufferConfig(**config),  # type: ignore[arg-type]
            batch_groups=batch_groups,
            version=lambda: self.version,
            on_drop=self._on_drop,
            on_accept=lambda entered: self.accepted.append(entered.group_id),
            oldest_first=oldest_first,
        )

    def _on_drop(self, dropped: Group, drop: Drop) -> None:
        self.dropped.append((dropped.group_id, drop.reason))


async def test_staleness_is_judged_when_a_group_is_handed_out() -> None:
    rig = Rig(max_staleness=0)
    waiting = asyncio.create_task(rig.buffer.get())
    await asyncio.sleep(0)
    rig.version = 5
    await rig.buffer.put(group(1, 0))
    await rig.buffer.put(group(2, 5))
    assert (await waiting).group_id == 2
    assert rig.dropped == [(1, DropReason.STALE)]


async def test_no_group_of_a_batch_is_stale_when_the_batch_is_complete() -> None:
    rig = Rig(max_staleness=1)
    waiting = asyncio.create_task(rig.buffer.get_many(3))
    for number in (1, 2):
        await rig.buffer.put(group(number, 0))
    await asyncio.sleep(0)
    assert [held.group_id for held in rig.buffer.groups()] == [1, 2]
    rig.version = 2
    for number in (3, 4, 5):
        await rig.buffer.put(group(number, 2))
    assert [held.group_id for held in await waiting] == [3, 4, 5]
    assert [number for number, _ in rig.dropped] == [1, 2]


async def test_a_batch_may_exceed_the_capacity() -> None:
    rig = Rig(capacity_factor=0.5)
    assert rig.buffer.capacity_groups == 1
    puts = [asyncio.create_task(rig.buffer.put(group(number, 0))) for number in range(5)]
    assert [held.group_id for held in await rig.buffer.get_many(5)] == [0, 1, 2, 3, 4]
    assert await asyncio.gather(*puts) == [None] * 5


async def test_a_nested_member_with_one_aborted_part_rejects_its_group() -> None:
    rig = Rig()
    parts = (FakeTrajectory((0,), "aborted"), FakeTrajectory((0,), "completed"))
    nested = Group("p1", 1, 0, 0, (Member(parts, "completed", 1.0, "ok", 0),))
    drop = await rig.buffer.put(nested)
    assert drop is not None
    assert drop.reason is DropReason.GENERATION_FAILED
    assert nested.oldest_version == 0


async def test_the_oldest_version_walks_nested_members() -> None:
    parts = (FakeTrajectory((7, 3)), FakeTrajectory((9,)))
    nested = Group("p1", 1, 0, 0, (Member(parts, "completed", 1.0, "ok", 0), Member((), "failed", 0.0, "ok", 0)))
    assert nested.oldest_version == 3


async def test_a_rejected_group_never_waits_for_room() -> None:
    rig = Rig(capacity_factor=0.5, filter="nonzero_std")
    await rig.buffer.put(group(1, 0))
    refused = await rig.buffer.put(group(2, 0, rewards=(1.0, 1.0)))
    assert str(refused) == "filtered: zero_std_1.0"
    assert not Drop(DropReason.FILTERED).reusable
    assert rig.buffer.get_metrics()["rollout/dynamic_filter/drop_zero_std_1.0"] == 1


async def test_a_cancelled_get_loses_no_group() -> None:
    rig = Rig()
    waiting = asyncio.create_task(rig.buffer.get_many(2))
    await rig.buffer.put(group(1, 0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await rig.buffer.put(group(2, 0))
    assert [held.group_id for held in await rig.buffer.get_many(2)] == [1, 2]


async def test_a_get_cancelled_together_with_the_put_that_serves_it_loses_no_group() -> None:
    rig = Rig()
    waiting = asyncio.create_task(rig.buffer.get())
    await asyncio.sleep(0)
    put = asyncio.create_task(rig.buffer.put(group(1, 0)))
    await put
    waiting.cancel()
    await asyncio.wait([waiting])
    if waiting.cancelled():
        assert (await rig.buffer.get()).group_id == 1


async def test_a_cancelled_put_leaves_its_group_out_and_the_next_in() -> None:
    rig = Rig(capacity_factor=0.5)
    await rig.buffer.put(group(1, 0))
    blocked = [asyncio.create_task(rig.buffer.put(group(number, 0))) for number in (2, 3)]
    await asyncio.sleep(0)
    blocked[0].cancel()
    assert [held.group_id for held in await rig.buffer.get_many(2)] == [1, 3]
    assert rig.accepted == [1, 3]


async def test_blocked_puts_enter_in_their_order_and_nobody_overtakes() -> None:
    rig = Rig(capacity_factor=0.5)
    for number in range(4):
        asyncio.create_task(rig.buffer.put(group(number, 0)), name=str(number))  # noqa: RUF006 - awaited through get
        await asyncio.sleep(0)
    first = await rig.buffer.get()
    late = asyncio.create_task(rig.buffer.put(group(9, 0)))
    assert [first.group_id] + [held.group_id for held in await rig.buffer.get_many(4)] == [0, 1, 2, 3, 9]
    await late


async def test_oldest_first_serves_by_draw_order() -> None:
    rig = Rig(oldest_first=True)
    for number in (3, 1, 2):
        await rig.buffer.put(group(number, 0))
    assert [held.group_id for held in await rig.buffer.get_many(3)] == [1, 2, 3]


async def test_after_the_end_a_get_returns_what_there_is() -> None:
    rig = Rig()
    await rig.buffer.put(group(1, 0))
    rig.buffer.end()
    assert [held.group_id for held in await rig.buffer.get_many(3)] == [1]
    with pytest.raises(asyncio.QueueEmpty):
        await rig.buffer.get()


async def test_a_failed_buffer_raises_even_if_groups_are_queued() -> None:
    rig = Rig()
    waiting = asyncio.create_task(rig.buffer.get_many(2))
    await rig.buffer.put(group(1, 0))
    await asyncio.sleep(0)
    rig.buffer.fail(KeyError("dead"))
    with pytest.raises(KeyError):
        await waiting
    with pytest.raises(KeyError):
        await rig.buffer.get()


async def test_only_groups_handed_out_count_into_staleness() -> None:
    rig = Rig(max_staleness=2)
    rig.version = 6
    for number, version in enumerate((1, 4, 6)):
        await rig.buffer.put(group(number, version))
    await rig.buffer.get_many(2)
    metrics = rig.buffer.get_metrics()
    assert metrics["rollout/fully_async/avg_staleness"] == 1.0
    assert metrics["rollout/fully_async/max_staleness"] == 2
    assert metrics["rollout/fully_async/dropped_avg_staleness"] == 5.0
    assert metrics["rollout/fully_async/staleness_0"] == 1
    assert metrics["rollout/fully_async/staleness_2"] == 1


def test_waits_are_measured() -> None:
    async def main() -> None:
        rig = Rig(capacity_factor=0.5)
        await rig.buffer.put(group(1, 0))
        late = asyncio.create_task(rig.buffer.put(group(2, 0)))
        await asyncio.sleep(3)
        await rig.buffer.get_many(2)
        await late
        metrics = rig.buffer.get_metrics()
        assert metrics["rollout/fully_async/put_wait_seconds"] == 3.0
        assert metrics["rollout/fully_async/get_wait_seconds"] == 0.0

    run_virtual(main())


def test_an_unknown_filter_is_an_error_that_says_how_to_name_one() -> None:
    with pytest.raises(PluginError, match=r"write package\.module:function"):
        Rig(filter="nonzero_sdt")


@settings(max_examples=60, deadline=None)
@given(
    puts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=25),
    capacity=st.sampled_from([0.5, 1.0, 2.0]),
    limit=st.sampled_from([None, 0, 2]),
    takes=st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 3.0), st.integers(0, 2)), min_size=1, max_size=10),
)
def test_every_group_is_held_handed_out_or_dropped_once(
    puts: list[tuple[int, int]], capacity: float, limit: int | None, takes: list[tuple[int, float, int]]
) -> None:
    """Puts at random times; gets that are cancelled after a random while, with the version rising in between."""

    async def main() -> None:
        rig = Rig(capacity_factor=capacity, max_staleness=limit)
        tasks = [asyncio.create_task(late_put(rig, number, *put)) for number, put in enumerate(puts)]
        handed: list[int] = []
        for count, patience_s, rise in takes:
            taking = asyncio.create_task(rig.buffer.get_many(count))
            await asyncio.wait([taking], timeout=patience_s)
            taking.cancel()
            await asyncio.wait([taking])
            if not taking.cancelled():
                handed += [taken.group_id for taken in taking.result()]
            rig.version = (rig.version or 0) + rise
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ended = handed + [held.group_id for held in rig.buffer.groups()] + [number for number, _ in rig.dropped]
        assert sorted(ended) == sorted(rig.accepted)

    async def late_put(rig: Rig, number: int, seconds: int, version: int) -> None:
        await asyncio.sleep(seconds)
        await rig.buffer.put(group(number, version))

    run_virtual(main())
