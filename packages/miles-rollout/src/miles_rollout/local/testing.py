"""Tiny models of the families the engine serves, as Hugging Face folders. For tests and examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 259
"""256 bytes and three special tokens."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.25,
}


def tiny_qwen3(folder: Path, *, seed: int = 0, tied: bool = True, tokenizer: bool = False) -> Path:
    """Write a two-layer Qwen3 with random weights and return its folder."""
    return _write(Qwen3ForCausalLM, Qwen3Config(**_SIZES, tie_word_embeddings=tied), folder, seed, tokenizer)


def tiny_qwen3_moe(folder: Path, *, seed: int = 0, tokenizer: bool = False) -> Path:
    """Write a three-layer Qwen3-MoE (8 experts, 2 a token, layer 1 dense) with random weights and return its folder."""
    sizes = _SIZES | {"num_hidden_layers": 3, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, mlp_only_layers=[1], norm_topk_prob=True)
    return _write(Qwen3MoeForCausalLM, config, folder, seed, tokenizer)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json whose ids 0 to 255 are bytes and 256 to 258 special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of_letter)
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|begin|>", "<|turn|>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))


def _byte_of_letter(letter: str) -> int:
    """Byte-level alphabets write printable bytes as themselves and the others, in order, from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) < 0x100 else others[ord(letter) - 0x100]


def _write(model_class: Any, config: PreTrainedConfig, folder: Path, seed: int, tokenizer: bool) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
    model.save_pretrained(folder)
    if tokenizer:
        write_byte_tokenizer(folder)
    return folder
