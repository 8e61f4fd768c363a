"""Weight updates: no stale prefix, exact version spans, the three pause modes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_rollout.local import EngineConfig, EnginePoisonedError, EngineReply, EngineRequest, SamplingParams
from miles_rollout.local.testing import SteppedEngine, checkpoint_tensors


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(0, 256, length))


def request(rid: str, *, seed: int = 1, length: int = 30, new: int = 10, experts: bool = False) -> EngineRequest:
    sampling = SamplingParams(max_new_tokens=new, sampling_seed=seed, ignore_eos=True)
    return EngineRequest(prompt(seed, length), sampling, rid=rid, return_routed_experts=experts)


def differences(folder: Path, reply: EngineReply) -> np.ndarray:
    """|logprob - fresh forward's| of each output token under the weights of `folder`."""
    ids = reply.input_ids + reply.output_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(reply.input_ids) - 1 : -1]
    picked = rows.gather(1, torch.tensor(reply.output_ids)[:, None])[:, 0].numpy()
    return np.abs(picked - reply.output_logprobs)


def test_a_prefix_of_old_weights_is_never_hit(dense_folder: Path, dense_folder_next: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.add(request("before"))
    engine.finish()
    engine.port.pause("retract")
    engine.update(checkpoint_tensors(dense_folder_next), 1)
    engine.port.resume()
    engine.add(request("after"))
    engine.finish()
    reply = engine.reply("after")
    assert (reply.cached_tokens, reply.weight_version_spans) == (0, ((0, 1),))
    assert differences(dense_folder_next, reply).max() < 1e-5


def test_retract_recomputes_under_the_new_weights(dense_folder: Path, dense_folder_next: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.add(request("r"))
    engine.step(4)
    engine.port.pause("retract")
    engine.port.flush()
    engine.update(checkpoint_tensors(dense_folder_next), 1)
    engine.port.resume()
    engine.finish()
    reply = engine.reply("r")
    assert reply.weight_version_spans == ((0, 0), (4, 1))
    assert reply.weight_version == 1
    assert reply.cached_tokens == 0
    assert differences(dense_folder, reply)[:4].max() < 1e-5
    assert differences(dense_folder_next, reply)[4:].max() < 1e-5


def test_in_place_keeps_what_old_weights_computed(dense_folder: Path, dense_folder_next: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.add(request("r"))
    engine.step(4)
    steps = engine.core.stats().steps
    engine.port.pause("in_place")
    engine.update(checkpoint_tensors(dense_folder_next), 7)
    engine.port.resume()
    engine.finish()
    reply = engine.reply("r")
    assert reply.weight_version_spans == ((0, 0), (4, 7))
    assert engine.core.stats().steps - steps == 6  # one step a token: nothing was computed again
    assert differences(dense_folder_next, reply)[4:].max() > 1e-3
    engine.add(request("same prompt"))
    engine.finish()
    again = engine.reply("same prompt")
    assert again.cached_tokens == 0  # a row of two versions is no prefix
    assert differences(dense_folder_next, again).max() < 1e-5


def test_abort_ends_requests_with_what_they_have(dense_folder: Path) -> None:
    engine = SteppedEngine(dense_folder, EngineConfig(max_running=1))
    engine.add(request("running"))
    engine.add(request("queued", seed=2))
    engine.step(3)
    engine.port.pause("abort")
    running, queued = engine.reply("running"), engine.reply("queued")
    assert (running.finish.type, len(running.output_ids), len(running.output_logprobs)) == ("abort", 3, 3)
    assert running.weight_version_spans == ((0, 0),)
    assert (queued.finish.type, queued.output_ids, queued.weight_version_spans) == ("abort", (), ())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_without_an_update_changes_nothing(dense_folder: Path, mode: str) -> None:
    plain, paused = SteppedEngine(dense_folder), SteppedEngine(dense_folder)
    for engine in (plain, paused):
        engine.add(request("a"))
        engine.add(request("b", seed=2))
    plain.finish()
    paused.step(3)
    paused.port.pause("retract" if mode == "retract" else "in_place")
    assert not paused.core.has_work
    paused.add(request("c", seed=3))  # waits
    paused.port.resume()
    paused.finish()
    for rid in "ab":
        assert paused.reply(rid).output_ids == plain.reply(rid).output_ids
    assert len(paused.reply("c").output_ids) == 10


def test_versions_label_each_of_several_updates(dense_folder: Path, dense_folder_next: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.add(request("r", new=9))
    for version, folder in ((1, dense_folder_next), (2, dense_folder), (5, dense_folder_next)):
        engine.step(2)
        engine.port.pause("retract")
        engine.update(checkpoint_tensors(folder), version)
        engine.port.resume()
    engine.finish()
    assert engine.reply("r").weight_version_spans == ((0, 0), (2, 1), (4, 2), (6, 5))


def test_routes_are_those_of_the_first_pass(moe_folder: Path, moe_folder_next: Path) -> None:
    untouched, retracted = SteppedEngine(moe_folder), SteppedEngine(moe_folder)
    for engine in (untouched, retracted):
        engine.add(request("r", experts=True))
        engine.step(4)
    retracted.port.pause("retract")
    retracted.update(checkpoint_tensors(moe_folder_next), 3)
    retracted.port.resume()
    untouched.finish()
    retracted.finish()
    reply, first = retracted.reply("r"), untouched.reply("r")
    assert reply.routed_experts is not None
    assert first.routed_experts is not None
    # Four tokens were drawn by passes over rows 0 to 32; row 33 consumed the fourth token under the new weights.
    assert reply.routed_experts_version_spans == ((0, 0), (33, 3))
    np.testing.assert_array_equal(reply.routed_experts[:33], first.routed_experts[:33])
    assert len(reply.routed_experts) == 30 + 10 - 1


def test_what_one_request_had_to_repeat_is_no_prefix_of_another(moe_folder: Path, moe_folder_next: Path) -> None:
    engine = SteppedEngine(moe_folder)
    engine.add(request("old", experts=True))
    engine.step(4)
    engine.port.pause("retract")
    engine.update(checkpoint_tensors(moe_folder_next), 1)
    engine.port.resume()
    engine.finish()
    engine.add(request("hit", experts=True))
    engine.finish()
    fresh = SteppedEngine(moe_folder_next)
    fresh.add(request("hit", experts=True))
    fresh.finish()
    hit = engine.reply("hit")
    assert (hit.cached_tokens, hit.routed_experts_version_spans) == (0, ((0, 1),))
    np.testing.assert_array_equal(hit.routed_experts, fresh.reply("hit").routed_experts)


def test_a_poisoned_engine_fails_its_requests_and_refuses_others(dense_folder: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.add(request("r"))
    engine.step(2)
    engine.port.poison("a digest differed")
    with pytest.raises(EnginePoisonedError, match="a digest differed"):
        engine.reply("r")
    with pytest.raises(EnginePoisonedError, match="a digest differed"):
        engine.add(request("next"))
    assert engine.port.describe().version is None


def test_only_a_whole_install_cures(dense_folder: Path, dense_folder_next: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.port.pause("abort")
    engine.port.poison("a digest differed")
    tensors = checkpoint_tensors(dense_folder_next)
    part = dict(list(tensors.items())[:-1])
    engine.port.begin("half", 1)
    engine.port.load(part)
    with pytest.raises(Exception, match="1 tensors did not arrive"):
        engine.port.commit(1, "")
    engine.port.poison("half an install")
    engine.update(tensors, 1)
    engine.port.resume()
    engine.add(request("r"))
    engine.finish()
    assert differences(dense_folder_next, engine.reply("r")).max() < 1e-5
