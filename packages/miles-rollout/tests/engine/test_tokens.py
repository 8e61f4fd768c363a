"""What the engine computes is what a plain forward of the same folder computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_rollout.local import EngineConfig, EngineReply, EngineRequest, SamplingParams
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.testing import SteppedEngine


def fresh_logprobs(folder: Path, ids: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [T, V] of a fresh forward by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def worst_difference(folder: Path, request: EngineRequest, reply: EngineReply) -> float:
    ids = request.input_ids + reply.output_ids
    expected = fresh_logprobs(folder, ids, request.sampling.temperature or 1.0)
    n = len(request.input_ids)
    rows = [float(expected[n - 1 + i, token]) for i, token in enumerate(reply.output_ids)]
    return float(np.abs(np.array(rows) - reply.output_logprobs).max())


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(0, 256, length))


MIXED = [
    EngineRequest(prompt(1, 3), SamplingParams(max_new_tokens=12, sampling_seed=1)),
    EngineRequest(prompt(2, 61), SamplingParams(max_new_tokens=5, temperature=0.7, sampling_seed=2)),
    EngineRequest(prompt(3, 20), SamplingParams(max_new_tokens=9, temperature=0.0)),
    EngineRequest(prompt(4, 33), SamplingParams(max_new_tokens=16, top_p=0.8, sampling_seed=4)),
    EngineRequest(prompt(5, 1), SamplingParams(max_new_tokens=10, top_k=5, temperature=1.3, sampling_seed=5)),
]


@pytest.mark.parametrize(
    "config",
    [EngineConfig(), EngineConfig(prefill_chunk=7, token_budget=11), EngineConfig(max_running=2, cache_rows=0)],
    ids=["default", "chunked", "two rows"],
)
@pytest.mark.verifies("transformers", "the local engine scores a mixed batch as a plain forward pass does")
def test_a_mixed_batch_has_the_logprobs_of_a_fresh_forward(folder: Path, config: EngineConfig) -> None:
    replies = LocalEngine(folder, config).generate_sync(MIXED)
    for request, reply in zip(MIXED, replies, strict=True):
        assert worst_difference(folder, request, reply) < 1e-5
        assert len(reply.output_ids) == request.sampling.max_new_tokens or reply.finish.type == "stop"


def test_greedy_takes_the_most_probable_token(folder: Path) -> None:
    request = EngineRequest(prompt(9, 17), SamplingParams(temperature=0.0, max_new_tokens=8))
    (reply,) = LocalEngine(folder, EngineConfig()).generate_sync([request])
    expected = fresh_logprobs(folder, request.input_ids + reply.output_ids)[16:-1].argmax(-1)
    assert list(reply.output_ids) == expected.tolist()


def test_a_group_computes_its_prompt_once(folder: Path) -> None:
    config = EngineConfig(prefill_chunk=16)
    group = [
        EngineRequest(prompt(7, 65), SamplingParams(max_new_tokens=6, sampling_seed=seed, ignore_eos=True))
        for seed in range(8)
    ]
    replies = LocalEngine(folder, config).generate_sync(group)
    assert [reply.cached_tokens for reply in replies] == [0] + [64] * 7
    for request, reply in zip(group, replies, strict=True):
        assert worst_difference(folder, request, reply) < 1e-5


def test_the_next_turn_reuses_everything_but_the_last_token(folder: Path) -> None:
    engine = LocalEngine(folder, EngineConfig())
    first = EngineRequest(prompt(8, 40), SamplingParams(max_new_tokens=20, sampling_seed=3, ignore_eos=True))
    (one,) = engine.generate_sync([first])
    second = EngineRequest(
        first.input_ids + one.output_ids + prompt(10, 5), SamplingParams(max_new_tokens=8, sampling_seed=4)
    )
    (two,) = engine.generate_sync([second])
    assert two.cached_tokens == 40 + 20 - 1
    assert worst_difference(folder, second, two) < 1e-5


def test_two_continuations_of_one_turn_both_reuse_it(folder: Path) -> None:
    engine = LocalEngine(folder, EngineConfig())
    first = EngineRequest(prompt(8, 40), SamplingParams(max_new_tokens=4, sampling_seed=3, ignore_eos=True))
    (one,) = engine.generate_sync([first])
    known = first.input_ids + one.output_ids
    branches = [
        EngineRequest(known + prompt(seed, 30), SamplingParams(max_new_tokens=3, sampling_seed=seed))
        for seed in (20, 21)
    ]
    replies = engine.generate_sync(branches)
    assert [reply.cached_tokens for reply in replies] == [43, 44]
    for request, reply in zip(branches, replies, strict=True):
        assert worst_difference(folder, request, reply) < 1e-5


def test_an_extra_key_keeps_caches_apart(dense_folder: Path) -> None:
    engine = LocalEngine(dense_folder, EngineConfig())
    ids, sampling = prompt(8, 40), SamplingParams(max_new_tokens=1, sampling_seed=3)
    keys = ["a", "b", "a", None]
    cached = [engine.generate_sync([EngineRequest(ids, sampling, extra_key=key)])[0].cached_tokens for key in keys]
    assert cached == [0, 0, 39, 0]


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(folder: Path) -> None:
    alone = [LocalEngine(folder, EngineConfig()).generate_sync([request])[0] for request in MIXED]
    together = LocalEngine(folder, EngineConfig(prefill_chunk=9)).generate_sync(MIXED)
    for one, other in zip(alone, together, strict=True):
        assert one.output_ids == other.output_ids
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-4)


def test_requests_without_a_seed_differ_and_follow_the_engines_seed(dense_folder: Path) -> None:
    requests = [EngineRequest(prompt(1, 5), SamplingParams(max_new_tokens=12))] * 2
    runs = [
        [r.output_ids for r in LocalEngine(dense_folder, EngineConfig(seed=seed)).generate_sync(requests)]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_scoring_gives_the_logprobs_of_the_tail(folder: Path) -> None:
    ids = prompt(11, 50)
    request = EngineRequest(ids, SamplingParams(max_new_tokens=0, temperature=0.0), logprob_start_len=29)
    engine = LocalEngine(folder, EngineConfig(prefill_chunk=8))
    engine.generate_sync([EngineRequest(ids, SamplingParams(max_new_tokens=1, temperature=0.0))])
    (reply,) = engine.generate_sync([request])
    expected = fresh_logprobs(folder, ids)
    assert reply.input_logprobs is not None
    np.testing.assert_allclose(reply.input_logprobs, [float(expected[i, ids[i + 1]]) for i in range(29, 49)], atol=1e-5)
    assert (reply.output_ids, reply.finish.type, reply.cached_tokens) == ((), "length", 29)


def test_stop_ids_end_a_request_and_stay_in_the_output(dense_folder: Path) -> None:
    engine = LocalEngine(dense_folder, EngineConfig())
    free = SamplingParams(max_new_tokens=20, sampling_seed=5, ignore_eos=True)
    (whole,) = engine.generate_sync([EngineRequest(prompt(1, 5), free)])
    stop = whole.output_ids[7]
    first = whole.output_ids.index(stop)
    sampling = SamplingParams(max_new_tokens=20, sampling_seed=5, stop_token_ids=(stop,), ignore_eos=True)
    (cut,) = engine.generate_sync([EngineRequest(prompt(1, 5), sampling)])
    assert cut.output_ids == whole.output_ids[: first + 1]
    assert (cut.finish.type, cut.finish.matched) == ("stop", stop)


@pytest.mark.parametrize(("no_stop_trim", "tail"), [(True, True), (False, False)])
def test_stop_strings_end_a_request(dense_folder: Path, no_stop_trim: bool, tail: bool) -> None:
    engine = LocalEngine(dense_folder, EngineConfig())
    # Greedy decoding of this model; the stop string is cut from what it says, so that it lies inside several tokens.
    free = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    (whole,) = engine.generate_sync([EngineRequest(tuple(b"hello"), free)])
    stop = whole.text[4:7]
    assert stop
    sampling = SamplingParams(
        max_new_tokens=30, temperature=0.0, ignore_eos=True, stop=("never said", stop), no_stop_trim=no_stop_trim
    )
    (cut,) = engine.generate_sync([EngineRequest(tuple(b"hello"), sampling)])
    assert (cut.finish.type, cut.finish.matched) == ("stop", stop)
    assert cut.output_ids == whole.output_ids[: len(cut.output_ids)]
    assert (stop in cut.text) is tail
    assert whole.text.startswith(cut.text)


def test_bf16_weights_are_stored_as_bf16(folder: Path) -> None:
    engine = LocalEngine(folder, EngineConfig(dtype="bf16"))
    assert {spec.dtype for spec in engine.port.describe().expected_tensors} == {"BF16"}
    (reply,) = engine.generate_sync([EngineRequest(prompt(1, 30), SamplingParams(max_new_tokens=8, sampling_seed=1))])
    assert worst_difference(folder, EngineRequest(prompt(1, 30)), reply) < 0.5


def test_rows_are_evicted_least_recently_used_first(dense_folder: Path) -> None:
    engine = SteppedEngine(dense_folder, EngineConfig(max_running=1, cache_rows=2))
    for name, seed in [("a", 1), ("b", 2), ("c", 3), ("a again", 1), ("d", 4), ("b again", 2), ("a once more", 1)]:
        engine.add(EngineRequest(prompt(seed, 30), SamplingParams(max_new_tokens=1, sampling_seed=1), rid=name))
        engine.finish()
    cached = {name: engine.reply(name).cached_tokens for name in ("a again", "b again", "a once more")}
    assert cached == {"a again": 29, "b again": 0, "a once more": 29}
