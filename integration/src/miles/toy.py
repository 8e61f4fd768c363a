"""The toy model: a Qwen3-MoE Hugging Face folder of a few hundred thousand parameters with a byte-level tokenizer.

It is written from scratch and pre-trained for seconds on the form of `miles.tasks.tool_sum`, with the wrong operator
in most calls and a little noise in the digits, so that rewards differ within a group and there is something to learn.

32 experts, top 3: with these two to three routes in a hundred (a token's experts in one layer) differ between a bf16
engine and the fp32 trainer, and each matters enough for replay to be seen (`integration/tests/test_replay_gain.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.config import MAX_HELD_OUT
from miles.tasks.tool_sum import Question, calculate, split_questions
from miles_trainer import Sample, Trainer, TrainerConfig

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHAT_FAMILY = "smollm2"
"""The toy speaks ChatML without a default system turn."""


@dataclass(frozen=True, slots=True)
class ToyRecipe:
    """Size and pre-training of the toy. Its digest names the folder in the cache."""

    seed: int = 0
    num_experts: int = 32
    top_k: int = 3
    hidden_size: int = 64
    steps: int = 200
    sequences_per_step: int = 32
    learning_rate: float = 2e-3
    right_operator_share: float = 0.4
    digit_noise: float = 0.04
    max_context: int = 256

    @property
    def folder_name(self) -> str:
        """`toy-` and the first 12 hex digits of the SHA-256 of the recipe."""
        return "toy-" + hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one id a byte (in the order of the byte-level alphabet), followed by `SPECIAL_TOKENS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def toy_folder(recipe: ToyRecipe, cache: Path) -> Path:
    """The pre-trained toy as a Hugging Face folder in `cache`; made there when it is absent."""
    folder = cache / recipe.folder_name
    if not (folder / "config.json").exists():
        unfinished = cache / f"{folder.name}.{os.getpid()}.tmp"
        write_toy(recipe, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster; its folder has the same bytes
            shutil.rmtree(unfinished)
    return folder


def write_toy(recipe: ToyRecipe, folder: Path) -> None:
    """Write an untrained toy to `folder`, pre-train it there and save it over the first weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_untrained(recipe, folder)
    with Trainer(_pretraining(recipe), folder) as trainer:
        for batch in _batches(recipe, Tokenizer.from_file(str(folder / "tokenizer.json"))):
            trainer.train_supervised(batch)
        trainer.export("F32").save_hf(folder)


def write_untrained(recipe: ToyRecipe, folder: Path) -> None:
    """Write config, random weights (from `recipe.seed`) and the byte-level tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end, padding = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        moe_intermediate_size=recipe.hidden_size // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.top_k,
        norm_topk_prob=True,
        max_position_embeddings=recipe.max_context,
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=padding,
    )
    config.head_dim = recipe.hidden_size // 4
    torch.manual_seed(recipe.seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def _pretraining(recipe: ToyRecipe) -> TrainerConfig:
    optimizer = {"learning_rate": recipe.learning_rate, "warmup_steps": 20}
    return TrainerConfig.model_validate({"optimizer": optimizer, "packing": {"max_tokens": 1_000_000}})


def _batches(recipe: ToyRecipe, tokenizer: Tokenizer) -> Iterator[list[Sample]]:
    dice = random.Random(recipe.seed)
    questions, _ = split_questions(MAX_HELD_OUT)
    for _ in range(recipe.steps):
        yield [
            _demonstration(recipe, tokenizer, dice, dice.choice(questions)) for _ in range(recipe.sequences_per_step)
        ]


def _demonstration(recipe: ToyRecipe, tokenizer: Tokenizer, dice: random.Random, question: Question) -> Sample:
    """One episode as the untrained policy would play it: the form is right, the operator and some digits are not."""
    operator = "+" if dice.random() < recipe.right_operator_share else "-"
    call = f"{_noisy(question.first, recipe, dice)}{operator}{_noisy(question.second, recipe, dice)}"
    result = calculate(call) or ""
    parts = [
        (f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n", 0),
        (f"{call}<|im_end|>", 1),
        (f"\n<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n", 0),
        (f"{_noisy(result, recipe, dice)}<|im_end|>", 1),
    ]
    runs = [(tokenizer.encode(text, add_special_tokens=False).ids, mask) for text, mask in parts]
    token_ids = np.array([token for ids, _ in runs for token in ids], dtype=np.int32)
    return Sample(
        group_id="pretraining",
        rollout_id="pretraining",
        token_ids=token_ids,
        loss_mask=np.array([mask for ids, mask in runs for _ in ids], dtype=np.uint8),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        version_spans=(),
        reward=0.0,
    )


def _noisy(digits: int | str, recipe: ToyRecipe, dice: random.Random) -> str:
    return "".join(dice.choice("0123456789") if dice.random() < recipe.digit_noise else digit for digit in str(digits))
