"""A bf16 engine against the fp32 trainer: routes differ, and replay brings the log-probabilities closer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from miles.run_folder import read_jsonl
from miles.wiring.samples import verified_batch
from miles_trainer import Sample, Trainer, TrainerConfig


def gap(model: Path, samples: Sequence[Sample], *, replay: bool) -> np.ndarray:
    """|trainer - engine| of every sampled token, nats."""
    torch.set_num_threads(1)
    config = TrainerConfig.model_validate({"replay": {"enabled": replay}})
    with Trainer(config, model) as trainer:
        scores = trainer.score(samples)
    return np.concatenate(
        [np.abs(score - s.logprobs)[s.loss_mask == 1] for score, s in zip(scores, samples, strict=True)]
    )


def test_replay_closes_the_gap_that_other_routes_open(toy: Path, run_tiny: Callable[..., Path]) -> None:
    folder = run_tiny(
        loop__steps=1, loop__evaluate=False, rollout__engine__dtype="bf16", rollout__worker__batch_groups=40
    )
    groups = [path.read_bytes() for path in sorted(folder.glob("trajectories/step-000001-*.bin"))]
    samples = verified_batch(groups).samples
    assert len(samples) == 40 * 8
    step = next(row for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row)
    replayed, chosen = gap(toy, samples, replay=True), gap(toy, samples, replay=False)
    print(
        f"routes that differ {step['replay/route_mismatch']:.2%} of {step['replay/routes']:.0f}; "
        f"mean |Δlogp| {chosen.mean():.3e} without replay, {replayed.mean():.3e} with; "
        f"largest {chosen.max():.3e} and {replayed.max():.3e}"
    )
    assert step["replay/route_mismatch"] >= 0.01
    assert replayed.mean() < chosen.mean()
