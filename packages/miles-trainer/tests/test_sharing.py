"""Sharing prefixes and taking old log-probabilities from the update pass change the work, not the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_trainer import Sample, Trainer, TrainerConfig
from miles_trainer.micro_batch import plan_micro_batches
from miles_trainer.objective.logprob import entropy, predicted_logprobs, tempered_log_softmax, token_logprobs
from miles_trainer.step_batch import build_scoring_step
from miles_trainer.testing import TINY_VOCABULARY, RowByRow, agreeing_routes, make_branching_samples, random_routes

OBJECTIVE = {"kl": {"coef": 0.1}, "entropy_coef": 0.05, "normalize_std": False}
ALONE = {"share_prefixes": False}


def _config(packing: dict[str, Any], **options: Any) -> TrainerConfig:
    defaults: dict[str, Any] = {"optimizer": {"clip_grad_norm": 1e9}, "objective": OBJECTIVE, "packing": packing}
    return TrainerConfig.model_validate(defaults | options)


def _step(folder: Path, samples: Sequence[Sample], config: TrainerConfig) -> tuple[dict[str, torch.Tensor], Any]:
    """The first moments after one step (gradients times 1 - beta1), and the metrics."""
    with Trainer(config, folder) as trainer:
        metrics = trainer.train(samples, step=0).metrics
        return dict(trainer.backend.moments()["exp_avg"]), metrics


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5)


def _gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return _norm(a[name] - b[name] for name in a)


def _results(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def _routed(samples: Sequence[Sample]) -> list[Sample]:
    """Routes that agree where sequences begin alike, but for the last sample, which has its own."""
    routes = [*agreeing_routes(samples)[:-1], random_routes(samples, seed=1)[-1]]
    return [replace(sample, routed_experts=route) for sample, route in zip(samples, routes, strict=True)]


@st.composite
def tries(draw: st.DrawFn) -> list[Sample]:
    """Samples over two token ids, so that prefixes of every length are common; masks are drawn token by token."""
    samples = []
    for index in range(draw(st.integers(2, 7))):
        tokens = draw(st.lists(st.integers(0, 1), min_size=2, max_size=9))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        logprobs = np.where(mask, -4 - 0.1 * np.arange(len(mask)), 0).astype(np.float32)
        samples.append(
            Sample(
                group_id=f"g{index % 2}",
                rollout_id=f"r{index}",
                token_ids=np.array(tokens, np.int32),
                loss_mask=np.array(mask, np.uint8),
                logprobs=logprobs,
                version_spans=((0, 0),),
                reward=draw(st.sampled_from([0.0, 0.2, 1.0])),
                temperature=draw(st.sampled_from([1.0, 0.7])),
            )
        )
    return samples


@settings(max_examples=25, deadline=None)
@given(tries(), st.integers(1, 4), st.sampled_from([4096, 12]), st.booleans())
def test_any_trie_gives_the_gradients_scores_and_metrics_of_sequences_alone(
    dense_dir: Path, samples: list[Sample], shortest: int, max_tokens: int, one_pass: bool
) -> None:
    packing = {"min_shared_tokens": shortest, "max_tokens": max_tokens}
    objective = OBJECTIVE | {"old_logprobs": "update_pass" if one_pass else "recompute"}
    shared, found = _step(dense_dir, samples, _config(packing, objective=objective))
    alone, expected = _step(dense_dir, samples, _config(ALONE))
    # Advantages of equal samples cancel: their parts, of size 0.1 here, bound the error of what is left.
    assert _gap(alone, shared) <= 1e-6 * _norm(alone.values()) + 2e-8
    assert _results(found) == pytest.approx(_results(expected), rel=2e-4, abs=2e-6)
    with Trainer(_config(packing), dense_dir) as ours, Trainer(_config(ALONE), dense_dir) as theirs:
        for mine, other in zip(ours.score(samples), theirs.score(samples), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("max_tokens", [4096, 40])
def test_replayed_routes_are_shared_only_where_they_agree(moe_dir: Path, max_tokens: int) -> None:
    samples = _routed(make_branching_samples())
    replay = {"enabled": True}
    packing = {"max_tokens": max_tokens, "min_shared_tokens": 2}
    shared, found = _step(moe_dir, samples, _config(packing, replay=replay))
    alone, expected = _step(moe_dir, samples, _config(ALONE, replay=replay))
    assert _gap(alone, shared) <= 1e-6 * _norm(alone.values())
    assert _results(found) == pytest.approx(_results(expected), rel=2e-4, abs=2e-6)
    assert found["replay/routes"] == expected["replay/routes"] > 0
    unrouted = _step(moe_dir, [replace(s, routed_experts=None) for s in samples], _config(packing))[1]
    assert 0 < found["perf/shared_tokens"] < unrouted["perf/shared_tokens"]


@pytest.mark.parametrize("kind", ["dense_dir", "moe_dir"])
def test_batch_invariant_scores_have_the_same_bits_shared_or_alone(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    samples = make_branching_samples()
    options: dict[str, Any] = {}
    if kind == "moe_dir":
        samples, options = _routed(samples), {"replay": {"enabled": True}}
    with (
        Trainer(_config({"min_shared_tokens": 1}, **options), folder, numerics=RowByRow()) as ours,
        Trainer(_config(ALONE, **options), folder, numerics=RowByRow()) as theirs,
    ):
        for mine, other in zip(ours.score(samples), theirs.score(samples), strict=True):
            assert mine.tobytes() == other.tobytes()


def _kept_bytes_per_token(folder: Path, samples: Sequence[Sample]) -> float:
    """What one forward pass keeps for its backward pass, by the tokens it computes."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with Trainer(_config({}), folder) as trainer:
        (micro,) = plan_micro_batches(build_scoring_step(samples), trainer.config.packing)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = trainer.backend.logits(micro)
        del logits
    return sum(storage.nbytes() for storage in kept.values()) / micro.computed_tokens


def test_many_samples_of_a_long_prompt_keep_the_memory_of_the_tokens_they_compute(dense_dir: Path) -> None:
    short, long = (
        _kept_bytes_per_token(dense_dir, make_branching_samples(groups=1, members=24, opening=opening))
        for opening in (40, 200)
    )
    assert long <= short


def test_tokens_are_counted_as_computed_and_shared(dense_dir: Path) -> None:
    samples = make_branching_samples()
    prefixes = {s.token_ids[: i + 1].tobytes() for s in samples for i in range(len(s.token_ids) - 1)}
    total = sum(len(s.token_ids) - 1 for s in samples)
    metrics = _step(dense_dir, samples, _config({"min_shared_tokens": 1}))[1]
    assert metrics["perf/computed_tokens"] == len(prefixes)
    assert metrics["perf/shared_tokens"] == total - len(prefixes)
    assert metrics["perf/packing_ratio"] == total / len(prefixes)
    alone = _step(dense_dir, samples, _config(ALONE))[1]
    assert (alone["perf/computed_tokens"], alone["perf/shared_tokens"]) == (total, 0)


@pytest.mark.parametrize("share", [True, False])
def test_the_update_pass_gives_the_gradient_of_a_recomputed_score(dense_dir: Path, share: bool) -> None:
    samples = make_branching_samples()
    packing = {"share_prefixes": share}
    kl = {"coef": 0.1, "unbiased": True}
    results = {
        source: _step(dense_dir, samples, _config(packing, objective=OBJECTIVE | {"old_logprobs": source, "kl": kl}))
        for source in ("recompute", "update_pass")
    }
    (one, recomputed), (other, updated) = results.values()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert _results(recomputed) == _results(updated)
    assert updated["train/ratio_min"] == updated["train/ratio_max"] == 1
    assert updated["train/train_rollout_logprob_abs_diff"] > 0


def test_the_update_pass_counts_replayed_routes(moe_dir: Path) -> None:
    samples = _routed(make_branching_samples())
    found = [
        _results(_step(moe_dir, samples, _config({}, replay={"enabled": True}, objective={"old_logprobs": source}))[1])
        for source in ("recompute", "update_pass")
    ]
    assert found[0] == found[1]
    assert found[0]["replay/routes"] > 0


@given(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(0, 99))
def test_chunks_of_predictions_change_no_number_and_no_gradient(chunk: int, reads: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    logits = (4 * torch.randn(8, TINY_VOCABULARY, dtype=torch.float64)).requires_grad_()
    temperature = 0.5 + torch.rand(8)
    prediction, tokens = torch.tensor(sorted(reads)), torch.randint(0, TINY_VOCABULARY, (len(reads),))
    weights, entropy_weights = torch.randn(len(reads)), torch.randn(8)
    found = predicted_logprobs(logits, temperature, tokens, prediction, chunk=chunk)
    ((found.logprobs * weights).sum() + (found.entropy * entropy_weights).sum()).backward()
    gradient, logits.grad = logits.grad, None
    log_softmax = tempered_log_softmax(logits, temperature)
    plain = token_logprobs(log_softmax[prediction], tokens)
    ((plain * weights).sum() + (entropy(log_softmax) * entropy_weights).sum()).backward()
    assert torch.equal(found.logprobs, plain)
    assert torch.equal(found.entropy, entropy(log_softmax))
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-9, atol=1e-12)


def test_a_token_without_probability_has_no_part_in_the_entropy_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    first = torch.zeros(1, dtype=torch.int64)
    predicted_logprobs(logits, torch.ones(1), first, first, chunk=1).entropy.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0
