"""Routing replay: own routes change nothing, others do, weights come from the router, binding is by live module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from miles_trainer import PackingConfig, ReplayError, RoutedExperts, Sample, Trainer, TrainerConfig
from miles_trainer.micro_batch import MicroBatch, plan_micro_batches
from miles_trainer.model import load_model
from miles_trainer.replay.records import dense_rows
from miles_trainer.replay.router import RouteReplay, find_routers
from miles_trainer.step_batch import build_scoring_step
from miles_trainer.testing import make_samples, random_routes

REPLAYED = TrainerConfig.model_validate({"optimizer": {"learning_rate": 1e-3}, "replay": {"enabled": True}})


def _own_routes(folder: Path, samples: Sequence[Sample]) -> list[RoutedExperts]:
    """What the model itself routes, recorded from plain forwards of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    records = []
    for sample in samples:
        chosen: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda _, __, output, kept=chosen: kept.append(output[2]))
            for router in find_routers(model).values()
        ]
        with torch.no_grad():
            model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None])
        for hook in hooks:
            hook.remove()
        records.append(RoutedExperts(torch.stack(chosen, 1)[:-1].int().numpy(), (), (0, 1), 8, 2))
    return records


def _with(samples: Sequence[Sample], routes: Sequence[RoutedExperts | None]) -> list[Sample]:
    return [replace(s, routed_experts=r) for s, r in zip(samples, routes, strict=True)]


def _micro_batches(replay: RouteReplay, samples: Sequence[Sample]) -> list[MicroBatch]:
    return plan_micro_batches(build_scoring_step(samples), PackingConfig(), routes=replay.rows(samples))


def test_replaying_the_models_own_routes_changes_no_bit(moe_dir: Path) -> None:
    samples = make_samples()
    own = _with(samples, _own_routes(moe_dir, samples))
    with Trainer(REPLAYED, moe_dir) as ours, Trainer(TrainerConfig(), moe_dir) as plain:
        for mine, other in zip(ours.score(own), plain.score(samples), strict=True):
            assert np.array_equal(mine, other)
        assert ours.train(own, step=0).metrics["replay/route_mismatch"] == 0


def test_other_routes_change_the_scores_and_are_counted(moe_dir: Path) -> None:
    samples = make_samples()
    others = _with(samples, random_routes(samples))
    with Trainer(REPLAYED, moe_dir) as ours, Trainer(TrainerConfig(), moe_dir) as plain:
        gaps = [np.abs(a - b).max() for a, b in zip(ours.score(others), plain.score(samples), strict=True)]
        metrics = ours.train(others, step=0).metrics
    assert max(gaps) > 1e-3
    assert 0.5 < metrics["replay/choice_mismatch"] < metrics["replay/route_mismatch"] <= 1
    assert metrics["replay/routes"] == sum(2 * (len(s.token_ids) - 1) for s in samples)


def test_score_and_update_passes_follow_the_same_routes(moe_dir: Path) -> None:
    others = make_samples()
    others = _with(others, random_routes(others))
    with Trainer(REPLAYED, moe_dir) as trainer:
        metrics = trainer.train(others, step=0).metrics
    assert metrics["train/ppo_kl"] == 0
    assert metrics["train/ratio_max"] == metrics["train/ratio_min"] == 1


def test_missing_spans_and_absent_records_leave_the_choice_to_the_model(moe_dir: Path) -> None:
    samples = make_samples()
    holed = []
    for routes in random_routes(samples):
        rows = len(routes.rows)
        holed.append(replace(routes, rows=routes.rows[:0], missing_spans=((0, rows),)))
    with Trainer(REPLAYED, moe_dir) as ours, Trainer(TrainerConfig(), moe_dir) as plain:
        expected = plain.score(samples)
        for routes in (holed, [None] * len(samples)):
            for mine, other in zip(ours.score(_with(samples, routes)), expected, strict=True):
                assert np.array_equal(mine, other)


def test_replayed_weights_are_the_routers_probabilities_with_gradient(moe_dir: Path) -> None:
    model = load_model(moe_dir)
    replay = RouteReplay(model)
    router = find_routers(model)[0]
    samples = make_samples(groups=1, members=1)
    computed = len(samples[0].token_ids) - 1
    hidden = torch.randn(computed, 32)
    logits, own_weights, own = router(hidden)
    disjoint = torch.stack([torch.tensor([e for e in range(8) if e not in row][:2]) for row in own.tolist()])
    rows = disjoint[:-1, None].repeat(1, 2, 1).int().numpy()
    routed = _with(samples, [RoutedExperts(rows, ((computed - 1, 1),), (0, 1), 8, 2)])
    with replay.loaded(_micro_batches(replay, routed)), replay.playing(0):
        _, weights, chosen = router(hidden)
        assert torch.equal(chosen[:-1], disjoint[:-1])
        assert torch.equal(chosen[-1], own[-1])
        probabilities = logits.softmax(-1).gather(-1, chosen)
        torch.testing.assert_close(weights, probabilities / probabilities.sum(-1, keepdim=True))
        assert bool((weights > 0).all())
        weights[:, 0].sum().backward()
        assert replay.counts() == (len(rows), len(rows), 2 * len(rows), 2 * len(rows))
    assert router.weight.grad is not None
    assert float(router.weight.grad.abs().sum()) > 0
    assert torch.equal(router(hidden)[1], own_weights)
    replay.close()


def test_routes_are_bound_to_live_modules_and_their_count_is_checked(moe_dir: Path) -> None:
    model = load_model(moe_dir)
    model.model.layers[0].mlp = type(model.model.layers[0].mlp)(model.config)
    replay = RouteReplay(model)
    samples = make_samples(groups=1, members=2)
    short = [replace(r, rows=r.rows[:, :1], layers=(0,)) for r in random_routes(samples)]
    with pytest.raises(ReplayError, match=r"1 recorded layers \(0,\), but the model has 2 live routers"):
        replay.rows(_with(samples, short))
    wide = [replace(r, num_experts=16) for r in random_routes(samples)]
    with pytest.raises(ReplayError, match="top 2 of 16 experts, the model routes top 2 of 8"):
        replay.rows(_with(samples, wide))
    unrouted = plan_micro_batches(build_scoring_step(samples), PackingConfig())
    with pytest.raises(ReplayError, match="planned without routes"), replay.loaded(unrouted):
        pass
    (micro,) = _micro_batches(replay, _with(samples, random_routes(samples)))
    with replay.loaded([micro]), replay.playing(0), torch.no_grad():
        model(input_ids=micro.input_ids, position_ids=micro.positions, use_cache=False, segments=micro.segments)
        assert replay.counts().choices == sum(4 * (len(s.token_ids) - 1) for s in samples)


def test_a_record_that_does_not_fit_is_refused_before_anything_changes(moe_dir: Path) -> None:
    samples = make_samples(groups=1)
    routes = random_routes(samples)
    routes[-1] = replace(routes[-1], rows=routes[-1].rows[:-1])
    with Trainer(REPLAYED, moe_dir) as trainer:
        before = trainer.backend.parameters["model.norm.weight"].detach().clone()
        with pytest.raises(ReplayError):
            trainer.train(_with(samples, routes), step=0)
        assert torch.equal(before, trainer.backend.parameters["model.norm.weight"])
        assert trainer.version == 0
        trainer.train(_with(samples, random_routes(samples)), step=0)


def test_playing_what_was_not_loaded_is_an_error(moe_dir: Path) -> None:
    replay = RouteReplay(load_model(moe_dir))
    with pytest.raises(ReplayError, match="has no routes"), replay.playing(0):
        pass


def test_replay_on_a_model_without_routers_is_refused(dense_dir: Path) -> None:
    with pytest.raises(ReplayError, match="no Qwen3-MoE routers"):
        Trainer(REPLAYED, dense_dir)


@given(st.integers(2, 12), st.data())
def test_dense_rows_place_each_row_at_its_token(tokens: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tokens - 2))
    count = data.draw(st.integers(0, tokens - 1 - start))
    spans = ((start, count),) if count else ()
    present = [t for t in range(tokens - 1) if not start <= t < start + count]
    rows = np.array([[[t % 8, (t + 1) % 8]] for t in present], dtype=np.int32).reshape(-1, 1, 2)
    dense = dense_rows(RoutedExperts(rows, spans, (0,), 8, 2), tokens)
    for t in range(tokens):
        expected = [t % 8, (t + 1) % 8] if t in present else [-1, -1]
        assert dense[t, 0].tolist() == expected


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rows": np.zeros((3, 1, 2), dtype=np.int32)}, "rows"),
        ({"missing_spans": ((3, 2),)}, "rows"),
        ({"missing_spans": ((0, 1), (0, 1)), "rows": np.array([[[0, 1]]] * 2)}, "rows"),
        ({"rows": np.array([[[0, 9]]] * 4)}, "index"),
        ({"rows": np.array([[[-1, -1]]] * 4)}, "index"),
        ({"rows": np.array([[[0, 2**32]]] * 4)}, "index"),
        ({"rows": np.array([[[3, 3]]] * 4)}, "duplicate"),
    ],
)
def test_records_that_do_not_fit_are_refused(change: dict[str, object], code: str) -> None:
    record = RoutedExperts(np.array([[[0, 1]]] * 4, dtype=np.int32), (), (0,), 8, 2)
    with pytest.raises(ReplayError) as raised:
        dense_rows(replace(record, **change), 5)  # type: ignore[arg-type]
    assert raised.value.code == code
