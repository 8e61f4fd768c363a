"""Packing: every sequence once, capacity kept, equal counts on every rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_trainer.micro_batch import plan_micro_batches
from miles_trainer.packing import first_fit_decreasing, level_bins, pack_tokens, rank_bins
from miles_trainer.step_batch import build_scoring_step
from miles_trainer.testing import make_samples

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@given(LENGTHS, st.integers(1, 40))
def test_each_sequence_is_in_one_bin_within_capacity(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(i for b in bins for i in b.members) == list(range(len(lengths)))
    for packed in bins:
        assert sum(lengths[i] for i in packed.members) <= capacity or len(packed.members) == 1


@given(LENGTHS, st.integers(1, 40), st.integers(1, 5))
def test_ranks_get_equally_many_bins_and_fillers_have_no_weight(lengths: list[int], capacity: int, ranks: int) -> None:
    bins = level_bins(first_fit_decreasing(lengths, capacity), ranks)
    shares = [rank_bins(bins, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    weighty = [i for share in shares for b in share if not b.filler for i in b.members]
    assert sorted(weighty) == list(range(len(lengths)))
    assert sum(b.filler for b in bins) < ranks


def test_positions_start_again_and_bounds_accumulate() -> None:
    packed = pack_tokens([np.array([5, 6, 7]), np.array([8])])
    assert packed.token_ids.tolist() == [5, 6, 7, 8]
    assert packed.positions.tolist() == [0, 1, 2, 0]
    assert packed.bounds.tolist() == [0, 3, 4]


@given(st.integers(1, 60), st.integers(1, 4))
def test_kept_positions_stand_one_before_their_token(max_tokens: int, ranks: int) -> None:
    step = build_scoring_step(make_samples(groups=2))
    seen = []
    for rank in range(ranks):
        for micro in plan_micro_batches(step, max_tokens=max_tokens, rank=rank, n_ranks=ranks):
            if not micro.is_filler:
                assert micro.input_ids[0, micro.keep + 1].tolist() == step.targets[micro.rows].tolist()
                assert micro.positions[0, micro.keep + 1].tolist() == step.positions[micro.rows].tolist()
                seen += micro.rows.tolist()
    assert sorted(seen) == list(range(step.n_tokens))
