"""Packing: shared prefixes once, every sequence whole, capacity kept, equal counts on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_trainer import PackingConfig
from miles_trainer.forest import Forest, build_forest
from miles_trainer.micro_batch import plan_micro_batches
from miles_trainer.packing import Bin, Segment, fill_bins, lay_out, level_bins, rank_bins
from miles_trainer.step_batch import build_scoring_step
from miles_trainer.testing import make_branching_samples, make_samples

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=25)
SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


def _arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, dtype=np.int32) for sequence in sequences]


def _unshared(lengths: list[int]) -> Forest:
    return build_forest([np.zeros(n, np.int32) for n in lengths], min_shared_tokens=None)


@given(SEQUENCES, st.integers(1, 4))
def test_a_path_spells_its_sequence_and_long_common_runs_stand_once(sequences: list[list[int]], shortest: int) -> None:
    forest = build_forest(_arrays(sequences), min_shared_tokens=shortest)
    for sequence, path in zip(sequences, forest.paths, strict=True):
        nodes = [forest.nodes[index] for index in path]
        assert [node.start for node in nodes] == [0, *(node.stop for node in nodes[:-1])]
        assert nodes[-1].stop == len(sequence)
        assert [node.parent for node in nodes] == [-1, *path[:-1]]
    for index, node in enumerate(forest.nodes):
        users = [s for s, path in zip(sequences, forest.paths, strict=True) if index in path]
        assert len({tuple(s[: node.stop]) for s in users}) == 1
        assert len(users) == 1 or len(node) >= shortest
    if shortest == 1:
        prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
        assert forest.length(range(len(forest.nodes))) == len(prefixes)


def test_a_short_common_run_is_not_split_but_a_longer_one_below_it_is() -> None:
    sequences = _arrays([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 9]])
    forest = build_forest(sequences, min_shared_tokens=3)
    assert [(node.start, node.stop) for node in forest.nodes] == [(0, 5), (5, 6), (5, 6), (0, 2)]
    assert forest.paths == ((0, 1), (0, 2), (3,))


def test_columns_of_a_symbol_count_too() -> None:
    routed = np.array([[1, 0], [2, 0], [3, 0]], dtype=np.int32)
    other = np.array([[1, 0], [2, 1], [3, 0]], dtype=np.int32)
    forest = build_forest([routed, other, routed], min_shared_tokens=1)
    assert forest.paths == ((0, 1), (0, 2), (0, 1))


@given(SEQUENCES, st.integers(1, 3), st.integers(1, 20))
def test_each_sequence_is_in_one_bin_that_keeps_its_budget(
    sequences: list[list[int]], shortest: int, budget: int
) -> None:
    forest = build_forest(_arrays(sequences), min_shared_tokens=shortest)
    bins = fill_bins(forest, budget)
    assert sorted(i for b in bins for i in b.members) == list(range(len(sequences)))
    for packed in bins:
        computed = forest.length({node for i in packed.members for node in forest.paths[i]})
        assert computed <= budget or len(packed.members) == 1


@given(LENGTHS, st.integers(1, 40))
def test_without_sharing_bins_are_filled_first_fit_decreasing(lengths: list[int], budget: int) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        slot = next((i for i, room in enumerate(rooms) if length <= room), None)
        if slot is None:
            rooms.append(budget - length)
        else:
            rooms[slot] -= length
    filled = [sum(lengths[i] for i in b.members) for b in fill_bins(_unshared(lengths), budget)]
    assert [budget - tokens for tokens in filled] == rooms


@given(SEQUENCES, st.integers(1, 20), st.integers(1, 5))
def test_ranks_get_equally_many_bins_and_fillers_have_no_weight(
    sequences: list[list[int]], budget: int, ranks: int
) -> None:
    forest = build_forest(_arrays(sequences), min_shared_tokens=1)
    bins = level_bins(fill_bins(forest, budget), ranks, forest)
    shares = [rank_bins(bins, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    weighty = [i for share in shares for b in share if not b.filler for i in b.members]
    assert sorted(weighty) == list(range(len(sequences)))
    assert sum(b.filler for b in bins) < ranks


def test_a_bin_is_split_between_groups() -> None:
    prompts = [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 3, 3]]
    sequences = _arrays([[*prompt, member] for prompt in prompts for member in range(4)])
    forest = build_forest(sequences, min_shared_tokens=1)
    assert level_bins(fill_bins(forest, 1000), 2, forest) == [Bin(tuple(range(4))), Bin(tuple(range(4, 12)))]


@given(SEQUENCES, st.integers(1, 3), st.data())
def test_a_layout_holds_each_path_once_and_in_order(
    sequences: list[list[int]], shortest: int, data: st.DataObject
) -> None:
    forest = build_forest(_arrays(sequences), min_shared_tokens=shortest)
    chosen = data.draw(st.sets(st.integers(0, len(sequences) - 1), min_size=1))
    members = [index for index in forest.order() if index in chosen]
    packed = lay_out(forest, members)
    assert [s.start for s in packed.segments] == [0, *(s.stop for s in packed.segments[:-1])]
    assert packed.segments[-1].stop == len(packed.positions)
    for member, places in zip(members, packed.places, strict=True):
        assert packed.positions[places].tolist() == list(range(len(sequences[member])))
        owners = packed.owners[places].tolist()
        assert [sequences[owner][p] for p, owner in enumerate(owners)] == sequences[member]
        assert _visible(packed.segments, int(places[-1])) == places.tolist()
    assert packed.shares.sum() == sum(len(sequences[member]) for member in members)


def _visible(segments: tuple[Segment, ...], token: int) -> list[int]:
    """Packed tokens that a token attends to, itself last."""
    segment = next(s for s in segments if s.start <= token < s.stop)
    seen = list(range(segment.start, token + 1))
    while segment.parent is not None:
        first, segment = segment.first_position, segments[segment.parent]
        assert first == segment.first_position + segment.stop - segment.start
        seen = [*range(segment.start, segment.stop), *seen]
    return seen


def test_nodes_that_no_other_member_branches_from_form_one_segment() -> None:
    forest = build_forest(_arrays([[1, 1, 1], [1, 1, 2], [1, 2, 2]]), min_shared_tokens=1)
    assert len(forest.nodes) == 5
    assert lay_out(forest, [0]).segments == (Segment(0, 3),)
    assert lay_out(forest, [0, 1]).segments == (Segment(0, 2), Segment(2, 3, 0, 2), Segment(3, 4, 0, 2))


@pytest.mark.parametrize("branching", [False, True])
@given(st.integers(1, 60), st.integers(1, 4))
def test_predictions_stand_one_before_their_token(branching: bool, max_tokens: int, ranks: int) -> None:
    step = build_scoring_step(make_branching_samples() if branching else make_samples(groups=2))
    packing = PackingConfig(max_tokens=max_tokens, min_shared_tokens=2)
    seen = []
    for rank in range(ranks):
        for micro in plan_micro_batches(step, packing, rank=rank, n_ranks=ranks):
            if not micro.is_filler:
                at = micro.keep[micro.predictions]
                assert (micro.positions[0, at] + 1).tolist() == step.positions[micro.rows].tolist()
                assert micro.predictions.tolist() == sorted(micro.predictions.tolist())
                assert len(set(micro.keep.tolist())) == len(micro.keep)
                seen += micro.rows.tolist()
    assert sorted(seen) == list(range(step.n_tokens))


def test_samples_at_other_temperatures_have_their_own_predictions() -> None:
    warm, cold = (make_samples(groups=1, members=1, temperature=t)[0] for t in (1.0, 0.5))
    (micro,) = plan_micro_batches(build_scoring_step([warm, cold]), PackingConfig())
    trained = int(warm.loss_mask.sum())
    assert micro.computed_tokens == micro.shared_tokens == len(warm.token_ids) - 1
    assert micro.temperatures.tolist() == [0.5, 1.0] * trained
    assert len(micro.rows) == len(micro.keep) == 2 * trained
