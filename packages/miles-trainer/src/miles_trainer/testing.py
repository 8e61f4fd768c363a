"""Small models, samples and a rank launcher for tests, here and in other packages.

Shapes: T tokens, L routed layers, K experts a token.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_trainer.sample import RoutedExperts, Sample

TINY_VOCABULARY = 61


def write_tiny_qwen3(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """A 2-layer dense Qwen3 of some 15,000 fp32 parameters as a Hugging Face folder."""
    torch.manual_seed(seed)
    settings = _common(tied) | {"intermediate_size": 48}
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    return folder


def write_tiny_qwen3_moe(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """A 2-layer Qwen3-MoE, 8 experts, top 2, as a Hugging Face folder. Routers are wide apart so that routes matter."""
    torch.manual_seed(seed)
    settings = _common(tied) | {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.mul_(10)
    model.save_pretrained(folder)
    return folder


def _common(tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }


def make_samples(
    *, groups: int = 3, members: int = 4, seed: int = 0, version: int = 0, temperature: float = 1.0, gaps: bool = True
) -> list[Sample]:
    """Groups of samples of different lengths with random tokens, masks with gaps, log-probabilities and rewards."""
    generator = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(groups):
        for member in range(members):
            tokens = int(generator.integers(6, 20))
            mask = np.ones(tokens, dtype=np.uint8)
            mask[: int(generator.integers(1, 4))] = 0
            if gaps:
                mask[tokens // 2] = 0
            samples.append(
                Sample(
                    group_id=f"g{group}",
                    rollout_id=f"g{group}r{member}",
                    token_ids=generator.integers(0, TINY_VOCABULARY, tokens).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask > 0, -4.1 + 0.1 * generator.standard_normal(tokens), 0).astype(np.float32),
                    version_spans=((0, -1), (int(np.flatnonzero(mask)[0]), version)),
                    reward=float(generator.integers(0, 2)) if member else float(group % 2),
                    temperature=temperature,
                )
            )
    return samples


def make_branching_samples(
    *, groups: int = 2, members: int = 3, seed: int = 0, version: int = 0, opening: int = 9
) -> list[Sample]:
    """Groups of samples that share: all of them `opening` tokens, a group its prompt, some members a first turn or all.

    Two sampled turns with an unsampled one between; rewards differ within a group.
    """
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(0, TINY_VOCABULARY, count)

    start = tokens(opening)
    samples: list[Sample] = []
    for group in range(groups):
        prompt, turn, reply, answer = tokens(6), tokens(5), tokens(4), tokens(3)
        for member in range(members):
            said = turn if member % 2 == 0 else np.append(turn[:2], tokens(3))
            parts = [start, prompt, said, reply, answer if member % 4 == 0 else tokens(int(generator.integers(1, 4)))]
            mask = np.concatenate([np.full(len(part), i in (2, 4)) for i, part in enumerate(parts)]).astype(np.uint8)
            noise = -4.1 + 0.1 * generator.standard_normal(len(mask))
            samples.append(
                Sample(
                    group_id=f"g{group}",
                    rollout_id=f"g{group}r{member}",
                    token_ids=np.concatenate(parts).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask > 0, noise, 0).astype(np.float32),
                    version_spans=((0, -1), (opening + 6, version)),
                    reward=float(member % 2) if member else 0.2,
                )
            )
    return samples


class RowByRow:
    """Batch-invariant numerics in the plainest form: linear layers a row at a time, attention a query at a time over a
    fixed number of keys.
    """

    def __init__(self, max_context: int = 64) -> None:
        self.max_context = max_context

    def forward(self) -> AbstractContextManager[None]:
        """Entered around each forward of the model."""
        return _RowLinear()

    def attend(
        self, query_QHD: torch.Tensor, key_SGD: torch.Tensor, value_SGD: torch.Tensor, first_position: int, scale: float
    ) -> torch.Tensor:
        """Causal attention of one sequence, [Q, H, D]."""
        share, missing = query_QHD.shape[1] // key_SGD.shape[1], self.max_context - len(key_SGD)
        keys, values = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)).repeat_interleave(share, 1).transpose(0, 1)
            for x in (key_SGD, value_SGD)
        )
        rows = []
        for i, query_HD in enumerate(query_QHD):
            hidden_S = torch.arange(self.max_context) > first_position + i
            scores_HS = (keys @ query_HD[:, :, None])[..., 0] * scale
            weights_HS = scores_HS.masked_fill(hidden_S, -torch.inf).softmax(-1)
            rows.append((weights_HS[:, None] @ values)[:, 0])
        return torch.stack(rows)


class _RowLinear(TorchFunctionMode):
    """Replaces `torch.nn.functional.linear` within its block."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        rows, weight = args[0].reshape(-1, args[0].shape[-1]), args[1]
        out = torch.cat([func(row, weight) for row in rows.split(1)])
        return out.reshape(*args[0].shape[:-1], len(weight))


def random_routes(
    samples: Sequence[Sample], *, layers: tuple[int, ...] = (0, 1), num_experts: int = 8, top_k: int = 2, seed: int = 0
) -> list[RoutedExperts]:
    """A full record of random distinct experts for each sample."""
    generator = np.random.default_rng(seed)
    routes = []
    for sample in samples:
        rows = len(sample.token_ids) - 1
        scores = generator.random((rows, len(layers), num_experts))
        chosen = np.argsort(scores, axis=-1)[..., :top_k].astype(np.int32)
        routes.append(RoutedExperts(chosen, (), layers, num_experts, top_k))
    return routes


def agreeing_routes(samples: Sequence[Sample], *, seed: int = 0) -> list[RoutedExperts]:
    """Random routes as a deterministic model records them: equal wherever samples begin with the same tokens."""
    rows: dict[bytes, np.ndarray] = {}
    routes = []
    for sample, drawn in zip(samples, random_routes(samples, seed=seed), strict=True):
        prefixes = [sample.token_ids[: i + 1].tobytes() for i in range(len(drawn.rows))]
        known = [rows.setdefault(prefix, row) for prefix, row in zip(prefixes, drawn.rows, strict=True)]
        routes.append(replace(drawn, rows=np.stack(known)))
    return routes


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: Path, arguments: Sequence[str], *, world_size: int, timeout_s: float = 60.0) -> list[str]:
    """Run `python script RANK WORLD_SIZE INIT_METHOD *arguments` on every rank, over loopback; the outputs by rank.

    Raises RuntimeError with a rank's output when it fails, and TimeoutError after `timeout_s` seconds; no process is
    left.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), address, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        outputs = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"ranks of {script.name} did not end within {timeout_s:g} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of {script.name} ended with {process.returncode}:\n{output}")
    return outputs
