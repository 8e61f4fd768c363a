"""Small models, samples and a rank launcher for tests, here and in other packages.

Shapes: T tokens, L routed layers, K experts a token.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
