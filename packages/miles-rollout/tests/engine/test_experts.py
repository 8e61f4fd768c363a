"""Routed experts: the rows of a reply are the routes of a plain forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from miles_rollout.local import EngineConfig, EngineReply, EngineRequest, RequestError, SamplingParams
from miles_rollout.local.engine import LocalEngine


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(0, 256, length))


def request(seed: int, length: int, start: int = 0) -> EngineRequest:
    sampling = SamplingParams(max_new_tokens=8, sampling_seed=seed, ignore_eos=True)
    return EngineRequest(prompt(seed, length), sampling, return_routed_experts=True, routed_experts_start_len=start)


def fresh_routes(folder: Path, ids: tuple[int, ...]) -> NDArray[np.int64]:
    """Sorted routes [T, L, K] of a fresh forward, from the router logits that transformers returns."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, dim=-1).indices.sort(-1).values for layer in logits], dim=1).numpy()


def assert_routes_are_fresh(folder: Path, wanted: EngineRequest, reply: EngineReply) -> None:
    expected = fresh_routes(folder, wanted.input_ids + reply.output_ids)[wanted.routed_experts_start_len : -1]
    assert reply.routed_experts is not None
    np.testing.assert_array_equal(np.sort(reply.routed_experts, axis=-1), expected)


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(prefill_chunk=9, token_budget=13)])
def test_routes_equal_those_of_a_fresh_forward(moe_folder: Path, config: EngineConfig) -> None:
    requests = [request(1, 40), request(2, 3), request(3, 25, start=7), request(1, 40)]
    replies = LocalEngine(moe_folder, config).generate_sync(requests)
    for wanted, reply in zip(requests, replies, strict=True):
        assert_routes_are_fresh(moe_folder, wanted, reply)
    assert replies[3].cached_tokens == 39  # its rows came with the prefix


def test_routes_of_the_next_turn_begin_where_asked(moe_folder: Path) -> None:
    engine = LocalEngine(moe_folder, EngineConfig())
    (one,) = engine.generate_sync([request(1, 40)])
    ids = one.input_ids + one.output_ids + prompt(9, 4)
    sampling = SamplingParams(max_new_tokens=3, sampling_seed=2)
    second = EngineRequest(ids, sampling, return_routed_experts=True, routed_experts_start_len=47)
    (two,) = engine.generate_sync([second])
    assert two.cached_tokens == 47
    assert_routes_are_fresh(moe_folder, second, two)
    assert two.routed_experts_start == 47


def test_the_engine_names_its_moe_layers(moe_folder: Path, dense_folder: Path) -> None:
    moe = LocalEngine(moe_folder, EngineConfig()).moe
    assert (moe.layers, moe.num_experts, moe.top_k) == ((0, 2), 8, 2)
    assert LocalEngine(dense_folder, EngineConfig()).moe.layers == ()


def test_a_dense_model_refuses_to_return_experts(dense_folder: Path) -> None:
    with pytest.raises(RequestError, match="without routed experts"):
        LocalEngine(dense_folder, EngineConfig()).generate_sync([request(1, 4)])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_each_way_to_multiply_by_experts_routes_the_same(moe_folder: Path, implementation: str) -> None:
    config = EngineConfig.model_validate({"experts_implementation": implementation})
    wanted = request(4, 30)
    (reply,) = LocalEngine(moe_folder, config).generate_sync([wanted])
    assert_routes_are_fresh(moe_folder, wanted, reply)
