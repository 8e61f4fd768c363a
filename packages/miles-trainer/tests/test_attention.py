"""Packed logits equal those of each sequence alone, in this package's attention and in transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from miles_trainer import ModelError, Trainer, TrainerConfig
from miles_trainer.attention import packed_attention
from miles_trainer.forest import build_forest
from miles_trainer.model import load_model
from miles_trainer.packing import lay_out


def _packed_logits(model: torch.nn.Module, sequences: list[np.ndarray]) -> torch.Tensor:
    """In the order of the sequences, each from the places of its own tokens."""
    packed = lay_out(build_forest(sequences, min_shared_tokens=1), range(len(sequences)))
    tokens = np.array([sequences[i][p] for i, p in zip(packed.owners, packed.positions, strict=True)])
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(tokens)[None],
            position_ids=torch.from_numpy(packed.positions)[None],
            use_cache=False,
            segments=packed.segments,
        ).logits[0]
    return logits[np.concatenate(packed.places)]


@pytest.mark.parametrize("kind", ["dense_dir", "moe_dir"])
def test_packed_logits_equal_unpacked_ones(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    generator = np.random.default_rng(0)
    start, middle, *ends = (generator.integers(0, 61, n) for n in (6, 4, 5, 1, 17, 9))
    sequences = [ends[0], ends[1], *(np.concatenate([start, end]) for end in ends)]
    sequences += [np.concatenate([start, middle, end]) for end in ends]
    packed = _packed_logits(load_model(folder), sequences).split([len(sequence) for sequence in sequences])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sequence, logits in zip(sequences, packed, strict=True):
        with torch.no_grad():
            alone = plain(input_ids=torch.from_numpy(sequence)[None]).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=2e-6)


class _RecordingNumerics:
    """Causal attention in the plainest form; remembers that it was entered and asked."""

    def __init__(self) -> None:
        self.forwards = 0
        self.lengths: list[int] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.forwards += 1
        yield

    def attend(
        self, query_QHD: torch.Tensor, key_SGD: torch.Tensor, value_SGD: torch.Tensor, first_position: int, scale: float
    ) -> torch.Tensor:
        assert first_position + len(query_QHD) == len(key_SGD)
        self.lengths.append(len(query_QHD))
        share = query_QHD.shape[1] // key_SGD.shape[1]
        keys, values = key_SGD.repeat_interleave(share, 1), value_SGD.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,shd->hqs", query_QHD, keys) * scale
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + first_position)
        return torch.einsum("hqs,shd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), values)


def test_numerics_compute_each_segment_of_each_forward(dense_dir: Path) -> None:
    from miles_trainer.testing import make_samples

    samples, numerics = make_samples(), _RecordingNumerics()
    with Trainer(TrainerConfig(), dense_dir, numerics=numerics) as ours, Trainer(TrainerConfig(), dense_dir) as plain:
        for mine, other in zip(ours.score(samples), plain.score(samples), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
        assert numerics.forwards == 1
        assert sorted(numerics.lengths) == sorted(2 * [len(s.token_ids) - 1 for s in samples])
        before = ours.backend.parameters["model.norm.weight"].detach().clone()
        ours.train(samples, step=0)
        assert numerics.forwards == 3
        assert not torch.equal(before, ours.backend.parameters["model.norm.weight"])


def test_attention_with_a_window_is_refused(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=4,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="sliding_attention"):
        load_model(tmp_path)


def test_features_that_packed_attention_lacks_are_refused() -> None:
    one = torch.ones(1, 1, 2, 4)
    with pytest.raises(ModelError, match="softcap"):
        packed_attention(torch.nn.Identity(), one, one, one, None, softcap=30.0)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)
