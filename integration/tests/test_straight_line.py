"""The synchronous loop against a straight line: the same engine and trainer classes, no buffer, no processes, no HTTP.

In batch-invariant mode the losses must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from miles.invariant import FixedBlocks
from miles.layers import from_file, resolve
from miles.run_folder import read_jsonl
from miles.tasks import tool_sum
from miles_rollout.data import PromptSource
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.requests import EngineRequest, SamplingParams
from miles_rollout.seeds import derive_seed, member_seed
from miles_tito import Tokenizer
from miles_trainer import RoutedExperts, Sample, Trainer

STEPS = 3
TINY = Path(__file__).parents[1] / "src" / "miles" / "recipes" / "tiny.toml"


def straight_line(model: Path) -> list[float]:
    """GRPO in one function: draw, play both turns, grade, train, copy the weights."""
    torch.set_num_threads(1)
    config = resolve(from_file(TINY)).config
    blocks = FixedBlocks(max_context=config.numerics.max_context, block_rows=config.numerics.block_rows)
    tokenizer = Tokenizer.load(model)
    training, _ = tool_sum.split_questions(config.task.held_out)
    source = PromptSource(tool_sum.prompts(training, "train"), config.rollout.data.model_copy(update={"seed": 0}))
    losses = []
    with Trainer(config.trainer, model, numerics=blocks) as trainer:
        engine = LocalEngine(model, config.rollout.engine, numerics=blocks)
        for step in range(STEPS):
            samples = [
                episode(engine, tokenizer, draw, member, step)
                for draw in source.draw_many(config.rollout.worker.batch_groups)
                for member in range(config.rollout.worker.group_size)
            ]
            losses.append(trainer.train(samples, step=step).metrics["train/loss"])
            engine.port.pause("retract")
            engine.port.flush()
            engine.port.begin("straight", step + 1)
            for unit in trainer.export("F32").units():
                engine.port.load(dict(unit))
            engine.port.commit(step + 1, "")
            engine.port.resume()
        engine.close()
    return losses


def episode(engine: LocalEngine, tokenizer: Tokenizer, draw, member: int, version: int) -> Sample:  # type: ignore[no-untyped-def]
    """Ask, run the tool, ask again; ids are joined by hand."""
    seed = member_seed(0, draw.prompt.prompt_id, epoch=draw.epoch, attempt=draw.attempt, member=member)
    stop = tokenizer.token_id("<|im_end|>")
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    rows: list[np.ndarray] = []
    said: list[str] = []
    asked = draw.prompt.messages[0]["content"]
    for turn in range(2):
        text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text if turn == 0 else "\n" + text)
        ids, mask, logprobs = ids + list(prompt), mask + [0] * len(prompt), logprobs + [0.0] * len(prompt)
        sampling = SamplingParams(
            max_new_tokens=8, stop_token_ids=(stop,), no_stop_trim=True, sampling_seed=derive_seed(seed, turn)
        )
        held = sum(len(part) for part in rows)
        request = EngineRequest(tuple(ids), sampling, return_routed_experts=True, routed_experts_start_len=held)
        (reply,) = engine.generate_sync([request])
        out = list(reply.output_ids)
        ids, mask, logprobs = ids + out, mask + [1] * len(out), logprobs + reply.output_logprobs.tolist()
        rows.append(reply.routed_experts)
        said.append(tokenizer.decode(out[:-1] if out[-1] == stop else out))
        result = tool_sum.calculate(said[0])
        if result is None or out[-1] != stop:
            break
        asked = result
    reward = 0.0 if len(said) < 2 else 1.0 if said[1] == draw.prompt.label and out[-1] == stop else 0.2
    layout = engine.moe
    routes = RoutedExperts(np.concatenate(rows), (), tuple(layout.layers), layout.num_experts, layout.top_k)
    arrays = np.array(ids, np.int32), np.array(mask, np.uint8), np.array(logprobs, np.float32)
    name = f"{draw.group_id}:{draw.attempt}:{member}"
    return Sample(str(draw.group_id), name, *arrays, ((0, version),), reward, 1.0, routes)


def test_the_synchronous_loop_equals_a_straight_line_bit_for_bit(toy: Path, run_tiny: Callable[..., Path]) -> None:
    folder = run_tiny(
        loop__steps=STEPS,
        loop__evaluate=False,
        numerics__batch_invariant=True,
        rollout__buffer__max_staleness=0,
        rollout__worker__staleness_policy="admit",
    )
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row]
    expected = straight_line(toy)
    assert [row["train/loss"] for row in rows] == expected
    assert len(set(expected)) == STEPS
    assert all(row["staleness/max"] == 0 for row in rows)
    assert all(row["logprob_diff/max"] == 0.0 for row in rows), (
        "true on-policy: trainer and engine compute the same bits"
    )
