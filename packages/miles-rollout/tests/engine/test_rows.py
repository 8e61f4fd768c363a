"""The row table against a plain model of what each row holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rollout.local.routes import RouteLayout, Routes
from miles_rollout.local.rows import RowTable

MAX_LEN = 12
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN)
DENSE = RouteLayout()
STEPS = st.lists(
    st.tuples(st.sampled_from(["acquire", "extend", "release", "drop", "update", "flush"]), PROMPTS, st.integers(0, 3)),
    max_size=40,
)


class Model:
    """Each token computed in a row, tagged with the version and extra key it was computed under."""

    def __init__(self, rows: int) -> None:
        self.cells: list[list[tuple[int, int, str]]] = [[] for _ in range(rows)]
        self.held: dict[int, list[int]] = {}
        self.keys: dict[int, str] = {}


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_a_reused_prefix_holds_the_same_tokens_of_one_version(steps: list[tuple[str, list[int], int]]) -> None:
    table, model, version = RowTable(4, MAX_LEN, DENSE), Model(4), 0
    for action, prompt, choice in steps:
        held = sorted(model.held)
        row = held[choice % len(held)] if held else -1
        if action == "acquire" and len(held) < 4:
            _acquire(table, model, prompt, version, "ab"[choice % 2])
        elif action == "extend" and held and len(model.cells[row]) < len(model.held[row]):
            done = len(model.cells[row])
            new = model.held[row][done : done + 1 + choice]
            _extend(table, row, new, version)
            model.cells[row] += [(token, version, model.keys[row]) for token in new]
        elif action in ("release", "drop") and held:
            (table.release if action == "release" else table.drop)(row)
            del model.held[row]
        elif action == "update":
            version += 1
            table.start_version(version)
        elif action == "flush":
            table.flush()
    assert table.held_rows == len(model.held)


def _extend(table: RowTable, row: int, ids: list[int], version: int) -> None:
    routes_nLK = np.zeros((len(ids), 0, 0), dtype=np.int32)
    table.extend(row, np.array(ids, dtype=np.int32), routes_nLK, np.full(len(ids), version, dtype=np.int64))


def _acquire(table: RowTable, model: Model, prompt: list[int], version: int, extra_key: str) -> None:
    ids = np.array(prompt, dtype=np.int32)
    lease = table.acquire(ids, (extra_key, version), len(prompt) - 1)
    assert lease.row not in model.held
    source = lease.row if lease.copy_from is None else lease.copy_from
    prefix = model.cells[source][: lease.reused]
    assert prefix == [(token, version, extra_key) for token in prompt[: lease.reused]]
    assert lease.reused <= len(prompt) - 1
    model.cells[lease.row] = list(prefix)
    model.held[lease.row] = prompt
    model.keys[lease.row] = extra_key


@given(PROMPTS, PROMPTS)
def test_the_longest_shared_prefix_is_found(first: list[int], second: list[int]) -> None:
    table = RowTable(2, MAX_LEN, DENSE)
    lease = table.acquire(np.array(first, dtype=np.int32), (None, 0), 0)
    _extend(table, lease.row, first, 0)
    table.release(lease.row)
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert table.match(np.array(second, dtype=np.int32), (None, 0), len(second))[1] == shared


@pytest.mark.parametrize("key", [(None, 1), ("x", 0)])
def test_another_key_never_matches(key: tuple[str | None, int]) -> None:
    table = RowTable(2, MAX_LEN, DENSE)
    ids = np.arange(5, dtype=np.int32)
    lease = table.acquire(ids, (None, 0), 4)
    _extend(table, lease.row, ids.tolist(), 0)
    assert table.match(ids, key, 5) == (-1, 0)


ROUTED = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=6, max_size=6)
"""(expert, version that chose it) of six positions."""


@given(ROUTED, st.lists(st.none() | st.integers(0, 1), min_size=6, max_size=6))
def test_a_prefix_is_reused_as_far_as_its_routes_are_the_requests(
    computed: list[tuple[int, int]], recorded: list[int | None]
) -> None:
    layout = RouteLayout((0,), num_experts=2, top_k=1)
    table, ids = RowTable(3, MAX_LEN, layout), np.arange(6, dtype=np.int32)
    lease = table.acquire(ids, (None, 1), 0)
    experts, versions = (np.array(column) for column in zip(*computed, strict=True))
    table.extend(lease.row, ids, experts[:, None, None], versions)
    table.release(lease.row)
    routes = Routes.empty(6, layout)
    for position, expert in enumerate(recorded):
        if expert is not None:
            routes.fill(position, np.full((1, 1, 1), expert), np.array([0]))
    served = [
        wanted == expert if wanted is not None else version == 1
        for (expert, version), wanted in zip(computed, recorded, strict=True)
    ]
    reused = served.index(False) if False in served else 6
    assert table.match(ids, (None, 1), 6, routes)[1] == reused
    again = table.acquire(ids, (None, 1), 6, routes)
    assert table.routes_RSLK[again.row, :reused, 0, 0].tolist() == experts[:reused].tolist()
    assert table.route_versions_RS[again.row, :reused].tolist() == versions[:reused].tolist()
