"""Batch-invariant numerics: neighbours and row position do not change a token's bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.errors import ContextTooLongError
from miles.invariant import FixedBlocks
from miles_trainer import Trainer, TrainerConfig
from miles_trainer.sample import Sample

BLOCKS = FixedBlocks(max_context=64, block_rows=16)


def test_a_row_does_not_depend_on_its_neighbours_or_its_place() -> None:
    torch.manual_seed(0)
    weight, row = torch.randn(48, 64), torch.randn(64)
    results = set()
    for n_rows in (1, 2, 15, 16, 17, 40):
        for place in {0, n_rows // 2, n_rows - 1}:
            rows = torch.randn(n_rows, 64)
            rows[place] = row
            with BLOCKS.forward():
                results.add(torch.nn.functional.linear(rows, weight)[place].numpy().tobytes())
    assert len(results) == 1


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 64), split=st.integers(0, 63), seed=st.integers(0, 1000))
def test_attention_in_pieces_equals_attention_at_once(length: int, split: int, seed: int) -> None:
    torch.manual_seed(seed)
    query, key, value = torch.randn(length, 4, 16), torch.randn(length, 2, 16), torch.randn(length, 2, 16)
    whole = BLOCKS.attend(query, key, value, 0, 0.25)
    cut = min(split, length - 1)
    tail = BLOCKS.attend(query[cut:], key, value, cut, 0.25)
    assert torch.equal(whole[cut:], tail)
    if cut:
        assert torch.equal(whole[:cut], BLOCKS.attend(query[:cut], key[:cut], value[:cut], 0, 0.25))


def test_attention_agrees_with_torch() -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(BLOCKS.attend(query, key, value, 0, 0.25), expected)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    long = torch.zeros(65, 2, 16)
    with pytest.raises(ContextTooLongError, match=r"65 tokens .* context of 64"):
        BLOCKS.attend(long, long, long, 0, 1.0)


def test_the_trainer_scores_a_sample_alike_alone_and_packed(toy: Path) -> None:
    dice = np.random.default_rng(0)
    samples = [_sample(dice.integers(0, 256, size=n), str(index)) for index, n in enumerate((9, 33, 60, 17))]
    with Trainer(TrainerConfig(), toy, numerics=BLOCKS) as trainer:
        together = trainer.score(samples)
        backwards = trainer.score(samples[::-1])[::-1]
        alone = [trainer.score([sample])[0] for sample in samples]
    assert _bits(together) == _bits(backwards) == _bits(alone)


def _sample(ids: np.ndarray, name: str) -> Sample:
    mask = np.ones(len(ids), np.uint8)
    mask[0] = 0
    zeros = np.zeros(len(ids), np.float32)
    return Sample(name, name, ids.astype(np.int32), mask, zeros, ((0, 0),), 0.0)


def _bits(arrays: Sequence[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]
