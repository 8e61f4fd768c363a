"""With numerics that fix the order of every sum, a request's numbers do not depend on its neighbours, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_rollout.local import EngineConfig, EngineReply, EngineRequest, SamplingParams
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.testing import RowByRowNumerics, SteppedEngine


def request(seed: int, length: int, new: int = 8) -> EngineRequest:
    ids = tuple(int(x) for x in np.random.default_rng(seed).integers(0, 256, length))
    sampling = SamplingParams(max_new_tokens=new, sampling_seed=seed, temperature=0.9, ignore_eos=True)
    return EngineRequest(ids, sampling, rid=str(seed), return_routed_experts=True)


def assert_identical(one: EngineReply, other: EngineReply) -> None:
    assert one.output_ids == other.output_ids
    assert one.output_logprobs.tobytes() == other.output_logprobs.tobytes()
    np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_alone_and_in_any_batch_the_bits_are_equal(moe_folder: Path) -> None:
    wanted = request(1, 27)
    (alone,) = LocalEngine(moe_folder, EngineConfig(), numerics=RowByRowNumerics()).generate_sync([wanted])
    neighbours = [request(seed, 5 * seed % 37 + 1) for seed in range(2, 9)]
    for config in (EngineConfig(), EngineConfig(prefill_chunk=5, token_budget=12), EngineConfig(max_running=3)):
        for position in (0, 4):
            batch = [*neighbours[:position], wanted, *neighbours[position:]]
            engine = LocalEngine(moe_folder, config, numerics=RowByRowNumerics())
            assert_identical(engine.generate_sync(batch)[position], alone)


def test_a_prefix_hit_and_a_retract_do_not_change_a_bit(moe_folder: Path) -> None:
    wanted = request(1, 27)
    (alone,) = LocalEngine(moe_folder, EngineConfig(), numerics=RowByRowNumerics()).generate_sync([wanted])
    engine = SteppedEngine(moe_folder, numerics=RowByRowNumerics())
    engine.add(wanted)
    engine.step(3)
    engine.port.pause("retract")
    engine.port.flush()
    engine.port.resume()
    engine.add(replace(wanted, rid="hit"))
    engine.finish()
    assert engine.reply("hit").cached_tokens == 26
    assert_identical(engine.reply("1"), alone)
    assert_identical(engine.reply("hit"), alone)


def test_numerics_agree_with_the_plain_kernels(moe_folder: Path) -> None:
    requests = [request(seed, 20) for seed in range(3)]
    plain = LocalEngine(moe_folder, EngineConfig()).generate_sync(requests)
    fixed = LocalEngine(moe_folder, EngineConfig(), numerics=RowByRowNumerics()).generate_sync(requests)
    for one, other in zip(plain, fixed, strict=True):
        assert one.output_ids == other.output_ids
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-5)


@cache
def alone(folder: Path, seed: int) -> EngineReply:
    engine = LocalEngine(folder, EngineConfig(), numerics=RowByRowNumerics())
    return engine.generate_sync([shared_prefix_request(seed)])[0]


def shared_prefix_request(seed: int) -> EngineRequest:
    """Two families of prompts that share 20 tokens, of different lengths."""
    return replace(request(seed % 2, 20 + seed % 5, new=6), rid=str(seed))


ACTIONS = st.lists(
    st.one_of(st.integers(0, 5), st.sampled_from(["step", "step", "retract", "in_place", "abort", "flush"])),
    max_size=25,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS, st.sampled_from([(16, 64), (2, 0)]), st.sampled_from([4, 512]))
def test_no_order_of_events_changes_a_bit(
    moe_folder: Path, actions: list[int | str], rows: tuple[int, int], chunk: int
) -> None:
    config = EngineConfig(max_running=rows[0], cache_rows=rows[1], prefill_chunk=chunk, token_budget=24)
    engine = SteppedEngine(moe_folder, config, RowByRowNumerics())
    added: set[int] = set()
    for action in actions:
        if isinstance(action, int) and action not in added:
            added.add(action)
            engine.add(shared_prefix_request(action))
        elif action == "step":
            engine.step()
        elif action == "abort":
            engine.core.abort("5")
        elif action in ("retract", "in_place", "flush"):
            engine.port.pause("in_place" if action == "in_place" else "retract")
            if action == "flush":
                engine.port.flush()
            engine.port.resume()
    engine.finish()
    assert engine.core.kv.table.held_rows == 0
    for seed in added:
        reply, expected = engine.reply(str(seed)), alone(moe_folder, seed)
        n = len(reply.output_ids)
        assert reply.finish.type == ("length" if n == 6 else "abort")
        assert reply.output_ids == expected.output_ids[:n]
        assert reply.output_logprobs.tobytes() == expected.output_logprobs[:n].tobytes()
        if n == 6:
            np.testing.assert_array_equal(reply.routed_experts, expected.routed_experts)
