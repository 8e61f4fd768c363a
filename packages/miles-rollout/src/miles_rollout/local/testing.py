"""Tiny models of the families the engine serves, as Hugging Face folders, and what tests need to look inside an engine.

Shapes: Q query tokens, S key tokens, H query heads, G key/value heads, J query heads per key/value head, D head size,
M rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_rollout.local.checkpoint import Checkpoint
from miles_rollout.local.config import EngineConfig
from miles_rollout.local.core import EngineCore
from miles_rollout.local.errors import EngineError
from miles_rollout.local.model import TORCH_DTYPE, load_model
from miles_rollout.local.requests import EngineReply, EngineRequest
from miles_rollout.local.store import DTYPE_NAMES, tensor_bytes
from miles_rollout.local.weights import EnginePort
from miles_rollout.protocols import Numerics

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


@dataclass(frozen=True, slots=True)
class MemoryTensor:
    """A `WireTensor` in memory."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def wire_tensor(tensor: torch.Tensor) -> MemoryTensor:
    """Return a copy of a tensor in its wire form."""
    copied = tensor.detach().clone().contiguous()
    return MemoryTensor(DTYPE_NAMES[copied.dtype], tuple(copied.shape), tensor_bytes(copied))


def checkpoint_tensors(folder: Path, config: EngineConfig | None = None) -> dict[str, MemoryTensor]:
    """Return all tensors of a folder as an engine of `config` stores them."""
    checkpoint, dtype = Checkpoint(folder), TORCH_DTYPE[(config or EngineConfig()).dtype]
    return {name: wire_tensor(checkpoint.tensor(name).to(dtype)) for name in checkpoint.specs}


class SteppedEngine:
    """An engine that computes one batch when told to, so that a test can act between two batches."""

    def __init__(self, folder: Path, config: EngineConfig | None = None, numerics: Numerics | None = None) -> None:
        chosen = config or EngineConfig()
        self.core = EngineCore(load_model(folder, chosen, None), chosen, "stepped:1", numerics)
        self.port = EnginePort(self.core, 1, lambda command: command())
        self.ended: dict[str, EngineReply | EngineError] = {}

    def add(self, request: EngineRequest) -> None:
        """Queue a request; what becomes of it appears in `ended` under its rid."""
        self.core.add(request, lambda outcome: self.ended.__setitem__(request.rid, outcome))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()

    def finish(self) -> None:
        """Step until nothing is left to compute."""
        while self.core.has_work:
            self.core.step()

    def reply(self, rid: str) -> EngineReply:
        """Return the reply of a request that has ended."""
        outcome = self.ended[rid]
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    def update(self, tensors: Mapping[str, MemoryTensor], version: int) -> None:
        """Install weights into the paused engine."""
        self.port.begin(f"test-{version}", version)
        self.port.load(tensors)
        self.port.commit(version, "")


class RowByRowNumerics:
    """The plainest batch-invariant numerics: one row a product, one query an attention over keys in fixed blocks.

    silu goes row by row too: torch's CPU kernel computes the last elements of a tensor in another way than the others,
    unless their number is a multiple of 32.
    """

    block = 16

    @contextmanager
    def forward(self) -> Iterator[None]:
        with _RowByRow():
            yield

    def attend(
        self,
        query_QHD: torch.Tensor,
        key_SGD: torch.Tensor,
        value_SGD: torch.Tensor,
        first_position: int,
        scale: float,
    ) -> torch.Tensor:
        rows = [
            self._attend_one(query_QHD[i], key_SGD, value_SGD, first_position + i + 1, scale)
            for i in range(len(query_QHD))
        ]
        return torch.stack(rows)

    def _attend_one(
        self, query_HD: torch.Tensor, key_SGD: torch.Tensor, value_SGD: torch.Tensor, seen: int, scale: float
    ) -> torch.Tensor:
        padded = -(-seen // self.block) * self.block
        shape = (padded, *key_SGD.shape[1:])
        key, value = key_SGD.new_zeros(shape), value_SGD.new_zeros(shape)
        key[:seen], value[:seen] = key_SGD[:seen], value_SGD[:seen]
        query_GJD = query_HD.reshape(key.shape[1], -1, query_HD.shape[-1])
        scores = torch.einsum("gjd,sgd->gjs", query_GJD, key) * scale
        scores[..., seen:] = float("-inf")
        return torch.einsum("gjs,sgd->gjd", scores.softmax(-1), value).reshape(query_HD.shape)


class _RowByRow(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.nn.functional.linear, torch.nn.functional.silu):
            return func(*args, **(kwargs or {}))
        x, *rest = args
        rows_M = x.reshape(-1, x.shape[-1])
        out = [func(rows_M[i : i + 1], *rest, **(kwargs or {})) for i in range(len(rows_M))]
        return torch.cat(out).reshape(*x.shape[:-1], -1) if out else func(*args, **(kwargs or {}))
