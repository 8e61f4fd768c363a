"""Training steps: invariance to packing, determinism, emptiness, skips, corrections, versions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_trainer import (
    GroupError,
    ObjectiveWarning,
    Sample,
    SampleError,
    Trainer,
    TrainerConfig,
    VersionIdentityError,
)
from miles_trainer.testing import make_samples


def _config(**options: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"optimizer": {"learning_rate": 1e-3, "clip_grad_norm": 1e9}} | options)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.backend.parameters.items()}


def _gradients(folder: Path, samples: Sequence[Sample], **options: Any) -> dict[str, torch.Tensor]:
    """The first moments after one step: gradients times 1 - beta1."""
    with Trainer(_config(**options), folder) as trainer:
        trainer.train(samples, step=0)
        return dict(trainer.backend.moments()["exp_avg"])


def _relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    gap = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return float((gap / sum(float(x.double().square().sum()) for x in a.values())) ** 0.5)


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant"])
def test_gradients_do_not_depend_on_packing_or_order(dense_dir: Path, aggregation: str) -> None:
    samples = make_samples()
    objective = {"aggregation": aggregation, "kl": {"coef": 0.1}, "entropy_coef": 0.05}
    if aggregation == "constant":
        objective["constant_divisor"] = 20
    baseline = _gradients(dense_dir, samples, objective=objective)
    for order, max_tokens in ((samples, 1), (samples, 50), (samples[::-1], 64)):
        found = _gradients(dense_dir, order, objective=objective, packing={"max_tokens": max_tokens})
        assert _relative(baseline, found) <= 1e-6


def test_the_same_input_gives_the_same_bits(dense_dir: Path) -> None:
    results = []
    for _ in range(2):
        with Trainer(_config(n_updates_per_batch=2), dense_dir) as trainer:
            for step in range(2):
                trainer.train(make_samples(seed=step, version=step), step=step)
            results.append(_weights(trainer))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.verifies("transformers", "the trainer scores as a plain forward pass does")
def test_scores_equal_a_plain_forward_at_the_samples_temperature(dense_dir: Path) -> None:
    samples = make_samples(temperature=0.6)
    plain = AutoModelForCausalLM.from_pretrained(dense_dir, dtype=torch.float32).eval()
    with Trainer(_config(), dense_dir) as trainer:
        scores = trainer.score(samples)
    for sample, score in zip(samples, scores, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0] / 0.6
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(sample.token_ids[1:, None].astype(np.int64)))
        expected = np.concatenate([[0], logprobs[:, 0].numpy()]) * sample.loss_mask
        np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-5)


def test_on_policy_scores_leave_nothing_to_correct(dense_dir: Path) -> None:
    samples = make_samples(temperature=0.6)
    with Trainer(_config(objective={"kl": {"coef": 0.1}}), dense_dir) as trainer:
        scored = [replace(s, logprobs=score) for s, score in zip(samples, trainer.score(samples), strict=True)]
        metrics = trainer.train(scored, step=0).metrics
    assert abs(metrics["train/ppo_kl"]) < 1e-9
    assert metrics["train/pg_clipfrac"] == 0
    assert abs(metrics["train/kl_loss"]) < 1e-9
    assert metrics["logprob_diff/max"] == 0
    assert metrics["train/tis"] == 1
    assert metrics["rollout/log_probs"] == metrics["rollout/ref_log_probs"]


def test_a_rewarded_sample_becomes_more_likely(dense_dir: Path) -> None:
    samples = make_samples(groups=1, members=4, gaps=False)
    rewarded = [replace(s, reward=float(i == 0)) for i, s in enumerate(samples)]
    with Trainer(_config(), dense_dir) as trainer:
        before = trainer.score(rewarded)
        trainer.train(rewarded, step=0)
        after = trainer.score(rewarded)
    changes = [float((b - a).sum()) for a, b in zip(before, after, strict=True)]
    assert changes[0] > 0
    assert changes[0] > max(changes[1:])


def test_groups_without_spread_are_counted_and_left_out(dense_dir: Path) -> None:
    samples = [replace(s, reward=1.0) if s.group_id == "g1" else s for s in make_samples()]
    with Trainer(_config(), dense_dir) as trainer:
        report = trainer.train(samples, step=0)
    assert report.no_spread == ("g1",)
    assert report.metrics["groups/no_spread"] == 1
    assert report.trained_tokens == sum(int(s.loss_mask.sum()) for s in samples if s.group_id != "g1")
    assert len(report.rollout_ids) == len(samples)
    full = _gradients(dense_dir, samples, objective={"entropy_coef": 1e-12})
    assert _relative(full, _gradients(dense_dir, samples)) <= 1e-6


@pytest.mark.parametrize("kind", ["no spread", "no mask"])
def test_a_step_without_anything_to_learn_moves_nothing(dense_dir: Path, kind: str) -> None:
    samples = make_samples()
    if kind == "no mask":
        samples = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples]
    else:
        samples = [replace(s, reward=0.5) for s in samples]
    with Trainer(_config(), dense_dir) as trainer:
        before = _weights(trainer)
        report = trainer.train(samples, step=0)
        assert all(torch.equal(before[name], now) for name, now in _weights(trainer).items())
        assert not trainer.backend.moments()["exp_avg"]
    assert report.skipped_steps == 1
    assert report.metrics["skipped_steps"] == 1
    assert report.version == 1


def test_a_fully_masked_sample_contributes_nothing_and_counts(dense_dir: Path) -> None:
    samples = make_samples()
    masked = replace(samples[0], loss_mask=np.zeros_like(samples[0].loss_mask))
    with Trainer(_config(), dense_dir) as trainer:
        report = trainer.train([masked, *samples[1:]], step=0)
    assert np.isfinite(report.metrics["train/loss"])
    assert report.trained_tokens == sum(int(s.loss_mask.sum()) for s in samples[1:])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_log_probability_that_is_no_number_is_counted_and_left_out(dense_dir: Path, value: float) -> None:
    samples = make_samples()
    active = int(np.flatnonzero(samples[0].loss_mask)[2])
    logprobs = samples[0].logprobs.copy()
    logprobs[active], logprobs[0] = value, value
    with Trainer(_config(), dense_dir) as trainer:
        report = trainer.train([replace(samples[0], logprobs=logprobs), *samples[1:]], step=0)
        assert all(torch.isfinite(p).all() for p in _weights(trainer).values())
    assert report.metrics["train/nonfinite_rollout_logprobs"] == 1
    assert np.isfinite(report.metrics["train/loss"])


def test_a_gradient_that_is_not_finite_skips_the_step(dense_dir: Path) -> None:
    with Trainer(_config(optimizer={"learning_rate": 1e-3, "warmup_steps": 4}), dense_dir) as trainer:
        with torch.no_grad():
            trainer.backend.parameters["model.norm.weight"][0] = torch.nan
        before = _weights(trainer)
        report = trainer.train(make_samples(), step=0)
        name = "model.embed_tokens.weight"
        assert torch.equal(before[name], trainer.backend.parameters[name])
        assert trainer.state.updates == 0
    assert report.skipped_steps == 1
    assert all(np.isfinite(value) for value in report.metrics.values())


def test_warm_up_counts_applied_updates(dense_dir: Path) -> None:
    config = _config(optimizer={"learning_rate": 1e-3, "warmup_steps": 4}, n_updates_per_batch=2)
    with Trainer(config, dense_dir) as trainer:
        trainer.train(make_samples(), step=0)
        rates = trainer.backend.optimizer.param_groups[0]["lr"]
        assert trainer.state.updates == 2
    assert rates == pytest.approx(5e-4)


def test_fresh_and_stale_tokens_are_reported_apart(dense_dir: Path) -> None:
    with Trainer(_config(), dense_dir) as trainer:
        trainer.train(make_samples(), step=0)
        stale, fresh = make_samples(seed=1)[:4], make_samples(groups=4, seed=2, version=1)[12:]
        scores = trainer.score(fresh)
        exact = [replace(s, logprobs=score) for s, score in zip(fresh, scores, strict=True)]
        metrics = trainer.train([*stale, *exact], step=1).metrics
    assert metrics["logprob_diff/max"] == 0
    assert metrics["stale_logprob_diff/mean"] > 0
    assert metrics["train/stale_tokens"] == sum(int(s.loss_mask.sum()) for s in stale)


def test_a_token_from_the_future_is_refused_before_anything_changes(dense_dir: Path) -> None:
    with Trainer(_config(), dense_dir) as trainer:
        before = _weights(trainer)
        with pytest.raises(VersionIdentityError, match=r"labelled version 1, but this trainer has published 0 … 0"):
            trainer.train(make_samples(version=1), step=0)
        assert all(torch.equal(before[name], now) for name, now in _weights(trainer).items())
        assert trainer.version == 0


def test_several_updates_move_the_ratio_and_keep_the_old_scores(dense_dir: Path) -> None:
    with Trainer(_config(n_updates_per_batch=3), dense_dir) as trainer:
        metrics = trainer.train(make_samples(), step=0).metrics
    assert metrics["train/ppo_kl"] != 0
    assert metrics["train/ess_ratio"] < 1


def test_samples_of_one_rollout_share_reward_and_group(dense_dir: Path) -> None:
    samples = make_samples(groups=1)
    with Trainer(_config(), dense_dir) as trainer:
        for change in ({"reward": 7.0}, {"group_id": "other"}):
            twin = replace(samples[0], **change)
            with pytest.raises(GroupError, match="share both"):
                trainer.train([*samples, twin], step=0)


def test_contradicting_samples_are_refused_with_their_values(dense_dir: Path) -> None:
    sample = make_samples(groups=1)[0]
    first = sample.loss_mask.copy()
    first[0] = 1
    broken = {
        "mask values": {"loss_mask": sample.loss_mask[:-1]},
        "starts with 0": {"loss_mask": first},
        "do not fit a vocabulary of 61": {"token_ids": sample.token_ids + 100},
        "not above 0": {"temperature": 0.0},
        "no group id": {"group_id": ""},
        "starts must ascend": {"version_spans": ((3, 0), (3, 1))},
    }
    with Trainer(_config(), dense_dir) as trainer:
        for message, change in broken.items():
            with pytest.raises(SampleError, match=message):
                trainer.train([replace(sample, **change)], step=0)
        with pytest.raises(SampleError, match="at least one sample"):
            trainer.train([], step=0)


def test_k1_in_the_loss_warns(dense_dir: Path) -> None:
    config = _config(objective={"kl": {"coef": 0.1, "estimator": "k1"}})
    with pytest.warns(ObjectiveWarning, match="does not depend on the reference"):
        Trainer(config, dense_dir).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(_config(objective={"kl": {"coef": 0.1, "estimator": "k2"}}), dense_dir).close()


def test_the_reference_stays_where_training_started(dense_dir: Path) -> None:
    with Trainer(_config(objective={"kl": {"coef": 0.1}}), dense_dir) as trainer:
        first = trainer.train(make_samples(), step=0).metrics["rollout/ref_log_probs"]
        trainer.train(make_samples(seed=5), step=1)
        again = trainer.train(make_samples(version=2), step=2).metrics
    assert again["rollout/ref_log_probs"] == first
    assert again["rollout/log_probs"] != first
    assert again["train/kl_loss"] > 0


def test_supervised_steps_lower_the_loss_and_ignore_temperature(dense_dir: Path) -> None:
    samples = make_samples(groups=1)
    losses = {}
    for temperature in (1.0, 0.3):
        with Trainer(_config(), dense_dir) as trainer:
            chosen = [replace(s, temperature=temperature) for s in samples]
            losses[temperature] = [trainer.train_supervised(chosen) for _ in range(4)]
            assert trainer.version == 0
    assert losses[1.0] == losses[0.3]
    assert losses[1.0] == sorted(losses[1.0], reverse=True)
    with Trainer(_config(), dense_dir) as trainer, pytest.raises(SampleError, match="nothing to learn"):
        trainer.train_supervised([replace(samples[0], loss_mask=np.zeros_like(samples[0].loss_mask))])


def test_supervised_loss_is_the_mean_over_target_tokens(dense_dir: Path) -> None:
    samples = make_samples(groups=1)
    with Trainer(_config(), dense_dir) as trainer:
        scores = trainer.score(samples)
        loss = trainer.train_supervised(samples)
    total = sum(float(score.sum()) for score in scores)
    assert loss == pytest.approx(-total / sum(int(s.loss_mask.sum()) for s in samples), rel=1e-5)


class _Doubling:
    """A number format that doubles weights: enough to see where it is applied."""

    def __init__(self) -> None:
        self.weights: set[str] = set()
        self.activations: set[str] = set()

    def fake_quantize_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        self.weights.add(name)
        return weight

    def fake_quantize_activation(self, name: str, activation: torch.Tensor) -> torch.Tensor:
        self.activations.add(name)
        return activation


@pytest.mark.parametrize("kind", ["dense_dir", "moe_dir"])
def test_a_quantizer_sees_every_linear_weight_under_its_own_name(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    samples, seen = make_samples(), _Doubling()
    with Trainer(_config(), folder, quantizer=seen) as ours, Trainer(_config(), folder) as plain:
        assert tuple(ours.backend.parameters) == tuple(plain.backend.parameters)
        for mine, other in zip(ours.score(samples), plain.score(samples), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
        ours.train(samples, step=0)
        names = {name for name in ours.export().names if name.endswith("_proj.weight")}
    assert names <= seen.weights
    assert {name.removesuffix(".weight") for name in seen.weights} == seen.activations


class _Gauges:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def count(self, name: str, value: float = 1.0) -> None:
        raise AssertionError("the trainer sets gauges only")

    def gauge(self, name: str, value: float) -> None:
        self.values[name] = value


def test_a_meter_hears_the_metrics_of_each_step(dense_dir: Path) -> None:
    gauges = _Gauges()
    with Trainer(_config(), dense_dir, meter=gauges) as trainer:
        report = trainer.train(make_samples(), step=0)
    assert gauges.values == report.metrics
