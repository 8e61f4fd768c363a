"""The local engine against transformers' own `generate`, in one process, on one thread, in turn.

    python benchmarks/local_engine.py [MODEL_DIR] [--rounds 3]

Prints one JSON object a line: tokens/s of both sides and their ratio, for prompts that share nothing, for a group that
shares its prompt, for a shared prefix, and for prompts of ragged length. Without a model folder a 2-layer Qwen3 of
random weights is made. The floor is `generate` without any sharing; where a prefix is shared, also `generate` with the
prefix's keys and values passed in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from miles_rollout.local.config import EngineConfig
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.requests import EngineRequest, SamplingParams
from miles_rollout.local.testing import tiny_qwen3

BATCH = 16
NEW_TOKENS = 32

Prompts = list[list[int]]


def main() -> None:
    """Measure every load and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or tiny_qwen3(Path(scratch))
        compare(folder, options.rounds)


def compare(folder: Path, rounds: int) -> None:
    """Both sides on the same prompts, alternating."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size
    loads: dict[str, tuple[Prompts, int]] = {
        "unshared": (_prompts(BATCH, 64, vocabulary), 0),
        "group of 16, prompt of 128": (_prompts(1, 128, vocabulary) * BATCH, 128),
        "shared 384": (_shared(384, 16, vocabulary), 384),
        "ragged prompts": ([p[: 16 + 6 * i] for i, p in enumerate(_prompts(BATCH, 112, vocabulary))], 0),
    }
    for name, (prompts, shared) in loads.items():
        sides: dict[str, Callable[[], int]] = {
            "engine": lambda prompts=prompts: _engine(folder, prompts),  # type: ignore[misc]
            "generate": lambda prompts=prompts: _generate(model, prompts),  # type: ignore[misc]
        }
        if shared:
            cache = _prefill(model, prompts[0][: shared - 1])
            sides["generate with prefix"] = lambda prompts=prompts, cache=cache: _generate(model, prompts, cache)  # type: ignore[misc]
        rates = _measure(sides, rounds)
        row = {"load": name, "model": folder.name, **{f"{side} tok/s": round(rate, 1) for side, rate in rates.items()}}
        row |= {f"engine / {side}": round(rates["engine"] / rates[side], 2) for side in rates if side != "engine"}
        print(json.dumps(row), flush=True)


def _measure(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            began = time.perf_counter()
            tokens = run()
            rates[side].append(tokens / (time.perf_counter() - began))
    return {side: statistics.median(values) for side, values in rates.items()}


ENGINES: dict[Path, LocalEngine] = {}


def _engine(folder: Path, prompts: Prompts) -> int:
    if folder not in ENGINES:
        ENGINES[folder] = LocalEngine(folder, EngineConfig(max_running=BATCH, cache_rows=0, max_context=512))
    engine = ENGINES[folder]
    engine.port.flush()
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, sampling_seed=1)
    replies = engine.generate_sync([EngineRequest(tuple(prompt), sampling) for prompt in prompts])
    return sum(len(reply.output_ids) for reply in replies)


@torch.no_grad()
def _generate(model: torch.nn.Module, prompts: Prompts, cache: DynamicCache | None = None) -> int:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    extra = {}
    if cache is not None:
        held = DynamicCache()
        for index, layer in enumerate(cache.layers):
            held.update(
                *(kv.repeat_interleave(len(prompts), dim=0) for kv in (layer.keys, layer.values)), layer_idx=index
            )
        extra["past_key_values"] = held
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        do_sample=True,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        **extra,
    )
    return len(prompts) * (out.shape[1] - longest)


@torch.no_grad()
def _prefill(model: torch.nn.Module, prefix: list[int]) -> DynamicCache:
    cache = DynamicCache()
    model(torch.tensor([prefix]), past_key_values=cache, use_cache=True)
    return cache


def _prompts(count: int, length: int, vocabulary: int) -> Prompts:
    dice = torch.Generator().manual_seed(length)
    return torch.randint(3, vocabulary, (count, length), generator=dice).tolist()  # type: ignore[no-any-return]


def _shared(shared: int, own: int, vocabulary: int) -> Prompts:
    (prefix,) = _prompts(1, shared, vocabulary)
    return [prefix + tail for tail in _prompts(BATCH, own, vocabulary)]


if __name__ == "__main__":
    main()
