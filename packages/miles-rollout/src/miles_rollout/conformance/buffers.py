"""Buffer scenarios: puts and gets in order, each with what it must do once the loop has settled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from miles_rollout.buffer import GroupBuffer
from miles_rollout.buffer_window import PREFIX
from miles_rollout.config import BufferConfig
from miles_rollout.conformance.compare import NotBuiltError, expect_equal
from miles_rollout.drops import Drop
from miles_rollout.groups import Group, Member
from miles_rollout.testing import FakeTrajectory, run_virtual

SETTLE_S = 1.0
_FILTERS = {None: None, "zero_std": "nonzero_std"}
_KEYS_OF_STALENESS = ("avg_staleness", "max_staleness", "buffer_avg_staleness", "buffer_max_staleness")


def check_buffer(vector: Mapping[str, Any]) -> None:
    """Raise AssertionError at the first operation that does not do what the vector expects."""
    run_virtual(_Scenario(vector["config"]).run(vector["ops"]))


class _Scenario:
    def __init__(self, config: Mapping[str, Any]) -> None:
        if config["filter"] not in _FILTERS:
            raise NotBuiltError(f"filter {config['filter']!r}")
        self._version: int | None = None
        self._unused: list[int] = []
        self._puts: dict[int, asyncio.Task[Drop | None]] = {}
        self._waiting: asyncio.Task[Group] | None = None
        self._dropped_stale = False
        limits = BufferConfig(
            capacity_factor=config["capacity_factor"],
            max_staleness=config["max_weight_staleness"],
            filter=_FILTERS[config["filter"]],
        )
        self._buffer = GroupBuffer(
            limits,
            batch_groups=config["rollout_batch_size"],
            version=lambda: self._version,
            on_drop=self._on_drop,
        )

    async def run(self, operations: list[Mapping[str, Any]]) -> None:
        for number, operation in enumerate(operations, start=1):
            what = f"operation {number} ({operation['op']})"
            actual = await self._apply(operation)
            expect_equal(what, actual, operation["expect"], tolerance=1e-9)
            if operation["op"] == "metrics" and not self._dropped_stale:
                extra = [key for key in self._staleness_keys(actual) if key not in operation["expect"]]
                expect_equal(f"{what}: keys that must be absent", extra, [])
        for task in (*self._puts.values(), self._waiting):
            if task is not None:
                task.cancel()

    async def _apply(self, operation: Mapping[str, Any]) -> Any:
        match operation["op"]:
            case "put":
                return await self._put(_group(operation))
            case "put_unblocked":
                await asyncio.sleep(SETTLE_S)
                return self._puts[operation["group"]].done()
            case "get":
                return await self._get(operation["current_version"])
            case "waiting_get_result":
                await asyncio.sleep(SETTLE_S)
                assert self._waiting is not None, "no get waits"
                return self._waiting.result().group_id
            case "unused":
                return self._unused
            case "metrics":
                return self._buffer.get_metrics()
        raise NotBuiltError(f"operation {operation['op']!r}")

    async def _put(self, group: Group) -> str:
        task = self._puts[group.group_id] = asyncio.create_task(self._buffer.put(group))
        await asyncio.sleep(SETTLE_S)
        return "done" if task.done() else "blocked"

    async def _get(self, version: int | None) -> int | str:
        self._version = version
        task = asyncio.create_task(self._buffer.get(current_version=version))
        await asyncio.sleep(SETTLE_S)
        if task.done():
            return task.result().group_id
        self._waiting = task
        return "waits"

    def _on_drop(self, group: Group, drop: Drop) -> None:
        self._dropped_stale = self._dropped_stale or drop.reason == "stale"
        if drop.reusable:
            self._unused.append(group.group_id)

    def _staleness_keys(self, metrics: Mapping[str, Any]) -> list[str]:
        return [key for name in _KEYS_OF_STALENESS if (key := f"{PREFIX}/{name}") in metrics]


def _group(operation: Mapping[str, Any]) -> Group:
    members = tuple(_member(sample) for sample in operation["samples"])
    number = operation["group"]
    return Group(str(number), number, 0, 0, members)


def _member(sample: Mapping[str, Any] | list[Mapping[str, Any]]) -> Member:
    """A member, or the parts of a nested one."""
    parts = sample if isinstance(sample, list) else [sample]
    trajectories = tuple(
        FakeTrajectory(tuple(part["versions"]), part["status"], reward=part["reward"]) for part in parts
    )
    return Member(trajectories, parts[-1]["status"], parts[-1]["reward"], "ok", seed=0)
