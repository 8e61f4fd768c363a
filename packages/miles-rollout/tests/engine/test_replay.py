"""Routes are repeated when a position is computed again: the record says what the engine used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from miles_rollout.local import EngineConfig, EngineReply, EngineRequest, RequestError, SamplingParams
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.experts import KNOWN_ROUTERS, repeat_choice
from miles_rollout.local.routes import HOLE, RouteLayout, Routes, decode_routes, shared_routes
from miles_rollout.local.testing import SteppedEngine, checkpoint_tensors

PROMPT = tuple(int(x) for x in np.random.default_rng(1).integers(0, 256, 30))
MORE = tuple(int(x) for x in np.random.default_rng(2).integers(0, 256, 20))
LAYOUT = RouteLayout((0, 2), num_experts=8, top_k=2)
Rows = NDArray[np.int32]


def request(rid: str, ids: tuple[int, ...] = PROMPT, *, new: int = 10, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(max_new_tokens=new, sampling_seed=1, ignore_eos=True)
    return EngineRequest(ids, sampling, rid=rid, return_routed_experts=True, **fields)


def next_turn(rid: str, reply: EngineReply, rows: Rows, **fields: Any) -> EngineRequest:
    """The following turn of a conversation: what the engine has said, more of the user, and the routes held."""
    ids = reply.input_ids + reply.output_ids + MORE
    return request(rid, ids, routed_experts_start_len=len(rows), routed_experts_prefix=rows, **fields)


def update(engine: SteppedEngine, folder: Path, version: int) -> None:
    engine.port.pause("retract")
    engine.port.flush()
    engine.update(checkpoint_tensors(folder), version)
    engine.port.resume()


def run(engine: SteppedEngine, wanted: EngineRequest) -> EngineReply:
    engine.add(wanted)
    engine.finish()
    return engine.reply(wanted.rid)


def rows_of(reply: EngineReply) -> Rows:
    assert reply.routed_experts is not None
    return reply.routed_experts


def gaps(folder: Path, reply: EngineReply, routes_TLK: Rows | None) -> NDArray[np.float32]:
    """|engine's log-probability - plain forward's| of each output token. Routes are the forward's own unless given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for place, layer in enumerate(LAYOUT.layers if routes_TLK is not None else ()):
        model.model.layers[layer].mlp.gate.register_forward_hook(_following(routes_TLK, place))
    ids = reply.input_ids + reply.output_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    logprobs = logits.log_softmax(-1)[len(reply.input_ids) - 1 :]
    picked = logprobs.gather(1, torch.tensor(reply.output_ids)[:, None])[:, 0].numpy()
    return np.abs(picked - reply.output_logprobs)


def _following(routes_TLK: Rows | None, place: int) -> Any:
    def hook(_router: Any, _args: Any, output: Any) -> Any:
        assert routes_TLK is not None
        chosen = torch.from_numpy(routes_TLK[:, place].astype(np.int64))
        weights = output[0].softmax(-1)[torch.arange(len(chosen))[:, None], chosen]
        return output[0], weights / weights.sum(-1, keepdim=True), chosen

    return hook


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(prefill_chunk=9, token_budget=13)])
def test_an_update_in_mid_request_keeps_the_recorded_routes(
    moe_folder: Path, moe_folder_next: Path, config: EngineConfig
) -> None:
    engine = SteppedEngine(moe_folder, config)
    wanted = request("r")
    engine.add(wanted)
    while engine.core.stats().generated_tokens < 4:
        engine.step()
    update(engine, moe_folder_next, 1)
    engine.finish()
    reply = engine.reply("r")
    rows = rows_of(reply)
    assert reply.weight_version_spans == ((0, 0), (4, 1))
    assert reply.routed_experts_version_spans == ((0, 0), (33, 1))
    assert gaps(moe_folder, reply, rows)[:4].max() < 1e-5
    assert gaps(moe_folder_next, reply, rows)[4:].max() < 1e-5
    assert gaps(moe_folder_next, reply, None)[4:].max() > 1e-3, "the weights would have routed otherwise"


def test_the_next_turn_repeats_what_it_carries(moe_folder: Path, moe_folder_next: Path) -> None:
    engine = SteppedEngine(moe_folder)
    first = run(engine, request("one"))
    update(engine, moe_folder_next, 1)
    second = run(engine, next_turn("two", first, rows_of(first)))
    rows = np.concatenate([rows_of(first), rows_of(second)])
    assert (second.cached_tokens, second.routed_experts_version_spans) == (0, ((0, 1),))
    assert len(rows) == len(second.input_ids) + len(second.output_ids) - 1
    assert gaps(moe_folder_next, second, rows).max() < 1e-5
    assert gaps(moe_folder_next, second, None).max() > 1e-3
    third = run(engine, next_turn("three", second, rows))
    assert third.cached_tokens == len(rows), "the rows were computed with the routes that are carried"
    assert gaps(moe_folder_next, third, np.concatenate([rows, rows_of(third)])).max() < 1e-5


def test_without_an_update_a_carried_prefix_is_a_hit(moe_folder: Path) -> None:
    engine = SteppedEngine(moe_folder)
    first = run(engine, request("one"))
    second = run(engine, next_turn("two", first, rows_of(first)))
    assert second.cached_tokens == len(rows_of(first))
    plain = SteppedEngine(moe_folder)
    run(plain, request("one"))
    without = run(plain, replace(next_turn("two", first, rows_of(first)), routed_experts_prefix=None))
    assert second.output_ids == without.output_ids
    np.testing.assert_array_equal(rows_of(second), rows_of(without))


def test_a_prefix_of_other_routes_is_not_reused(moe_folder: Path) -> None:
    engine = SteppedEngine(moe_folder)
    first = run(engine, request("one"))
    changed = rows_of(first).copy()
    changed[21, 1] = (changed[21, 1] + 1) % LAYOUT.num_experts
    second = run(engine, next_turn("two", first, changed))
    assert second.cached_tokens == 21
    rows = np.concatenate([changed, rows_of(second)])
    assert gaps(moe_folder, second, rows).max() < 1e-5
    stranger = run(engine, request("stranger", second.input_ids))
    assert stranger.cached_tokens == len(rows_of(first)), "it gets the first turn's row, not the second's"
    assert gaps(moe_folder, stranger, rows_of(stranger)).max() < 1e-5
    assert gaps(moe_folder, stranger, None).max() < 1e-5


def test_members_that_hold_the_same_routes_compute_a_prefix_once(moe_folder: Path, moe_folder_next: Path) -> None:
    engine = SteppedEngine(moe_folder, EngineConfig(prefill_chunk=8))
    first = run(engine, request("one"))
    update(engine, moe_folder_next, 1)
    members = [next_turn(rid, first, rows_of(first)) for rid in "abc"]
    for member in members:
        engine.add(member)
    engine.finish()
    replies = [engine.reply(member.rid) for member in members]
    assert [reply.cached_tokens for reply in replies] == [0, 59, 59]
    for reply in replies:
        assert gaps(moe_folder_next, reply, np.concatenate([rows_of(first), rows_of(reply)])).max() < 1e-5


def test_a_request_waits_only_for_what_will_serve_it() -> None:
    def routes(known: int, expert: int, version: int) -> Routes:
        found = Routes.empty(8, RouteLayout((0,), num_experts=2, top_k=1))
        found.fill(0, np.full((known, 1, 1), expert), np.full(known, version))
        return found

    cases = [
        (None, None, 8),  # neither records
        (None, routes(3, 0, 1), 8),  # what is settled was chosen by today's weights
        (None, routes(3, 0, 0), 0),  # it repeats what older ones chose
        (routes(3, 0, 0), routes(3, 0, 0), 8),
        (routes(3, 0, 0), routes(3, 1, 0), 0),
        (routes(5, 0, 0), routes(3, 0, 0), 3),  # nobody knows yet what it will choose at 3
        (routes(5, 0, 0), None, 0),
    ]
    assert [shared_routes(one, other, 1, 8) for one, other, _ in cases] == [expected for _, _, expected in cases]


def changed_rows(rows: Rows, row: int, layer: int, experts: tuple[int, int]) -> Rows:
    rows = rows.copy()
    rows[row, layer] = experts
    return rows


SOUND = np.tile(np.array([0, 1], dtype=np.int32), (5, 2, 1))


@pytest.mark.parametrize(
    ("prefix", "start", "experts", "message"),
    [
        (SOUND, 4, True, r"int32 \[5, 2, 2\]; int32 \[4, 2, 2\] was expected"),
        (SOUND[:, :1], 5, True, r"int32 \[5, 1, 2\]"),
        (SOUND.astype(np.int64), 5, True, "int64"),
        (changed_rows(SOUND, 3, 0, (1, 8)), 5, True, "names expert 8; the model has 0 to 7"),
        (changed_rows(SOUND, 3, 0, (HOLE, 1)), 5, True, "names expert -1"),
        (changed_rows(SOUND, 3, 1, (4, 4)), 5, True, "row 3 names an expert twice in layer 2"),
        (SOUND, 5, False, "needs return_routed_experts"),
    ],
)
def test_an_unsound_prefix_is_refused(moe_folder: Path, prefix: Rows, start: int, experts: bool, message: str) -> None:
    wanted = replace(
        request("r", routed_experts_start_len=start, routed_experts_prefix=prefix), return_routed_experts=experts
    )
    with pytest.raises(RequestError, match=message) as caught:
        LocalEngine(moe_folder, EngineConfig()).generate_sync([wanted])
    assert caught.value.code == "invalid_experts_prefix"


@pytest.mark.parametrize(("text", "message"), [("no base64!", "not base64"), ("AAAA", "3 bytes; 80 make int32")])
def test_a_prefix_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        decode_routes(text, 5, LAYOUT)
    assert caught.value.code == "invalid_experts_prefix"


@pytest.mark.parametrize("name", sorted(KNOWN_ROUTERS))
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_made_to_repeat_its_own_choice_gives_the_same_bits(
    name: str, normalise: bool, dtype: torch.dtype
) -> None:
    router = build_router(name, normalise).to(dtype)
    output = router(torch.randn(40, 32, generator=torch.Generator().manual_seed(2)).to(dtype))
    recorded = output[2].clone()
    recorded[7:] = HOLE
    for found, expected in zip(repeat_choice(router, recorded, output), output, strict=True):
        assert torch.equal(found, expected)
    recorded[3] = torch.tensor([5, 0])
    _, weights, chosen = repeat_choice(router, recorded, output)
    assert chosen[3].tolist() == [5, 0]
    wanted = output[0][3].float().softmax(-1)[[5, 0]]
    assert torch.equal(weights[3], (wanted / wanted.sum() if normalise else wanted).to(dtype))


def build_router(name: str, normalise: bool) -> torch.nn.Module:
    """A router of a family of transformers, with random weights."""
    family = {"FlexOlmo": "flex_olmo", "Olmoe": "olmoe", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "vocab_size": 300,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "norm_topk_prob": normalise,
    }
    config = AutoConfig.for_model(family[name.removesuffix("TopKRouter")], **sizes)
    model = AutoModelForCausalLM.from_config(config)
    router: torch.nn.Module = next(m for m in model.modules() if type(m).__name__ == name)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return router.requires_grad_(False)
