"""Loading a model that the engine can run, and refusing, by name, what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from miles_rollout.local.attention import ATTENTION_NAME
from miles_rollout.local.checkpoint import Checkpoint
from miles_rollout.local.config import EngineConfig
from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.experts import RouteCapture
from miles_rollout.local.kv import KVLayout
from miles_rollout.local.requests import RequestLimits
from miles_rollout.local.store import WeightStore
from miles_rollout.protocols import WeightFormat

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_CONTEXT = 4096
_STABLE_ROPE = {"default", "linear", "llama3", "yarn"}

Detokenize = Callable[[Sequence[int], bool], str]
"""(ids, skip special tokens) → text."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with everything the engine needs to know about it."""

    model_dir: Path
    module: torch.nn.Module
    capture: RouteCapture
    weights: WeightStore
    kv_layout: KVLayout
    limits: RequestLimits
    eos_ids: frozenset[int]
    detokenize: Detokenize | None
    quant_config: Mapping[str, Any] | None


def load_model(model_dir: Path, config: EngineConfig, weight_format: WeightFormat | None) -> ServedModel:
    """Build the model of a folder and install its weights.

    Raises `EngineSetupError` for a folder that is no checkpoint and for families whose layers do not fit KV rows.
    """
    if not (model_dir / "config.json").is_file():
        raise EngineSetupError(
            f"{model_dir} holds no config.json: give a Hugging Face folder", code="checkpoint_missing"
        )
    hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    check_family(hf_config)
    module = _build(hf_config, config)
    checkpoint = Checkpoint(model_dir)
    weights = WeightStore(module, checkpoint, weight_format)
    weights.check_checkpoint(checkpoint)
    weights.install_checkpoint(checkpoint)
    detokenize = _load_detokenizer(model_dir)
    capture = RouteCapture(module)
    limits = RequestLimits(
        vocab_size=int(hf_config.vocab_size),
        max_context=_max_context(hf_config, config),
        has_tokenizer=detokenize is not None,
        routes=capture.layout,
    )
    layout = _kv_layout(hf_config, TORCH_DTYPE[config.dtype])
    return ServedModel(
        model_dir,
        module,
        capture,
        weights,
        layout,
        limits,
        _eos_ids(model_dir, hf_config),
        detokenize,
        getattr(hf_config, "quantization_config", None),
    )


def check_family(hf_config: Any) -> None:
    """Raise `EngineSetupError` naming the layer type that has no KV rows here."""
    kinds = sorted(set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"})
    if getattr(hf_config, "sliding_window", None) and not kinds and not getattr(hf_config, "layer_types", None):
        kinds = ["sliding_attention"]
    if getattr(hf_config, "kv_lora_rank", None):
        kinds.append("latent attention (MLA)")
    if any(getattr(hf_config, name, None) for name in ("layers_block_type", "ssm_cfg", "state_size")):
        kinds.append("state space (Mamba)")
    if kinds:
        raise EngineSetupError(
            f"model type {hf_config.model_type!r} has layers of type {', '.join(kinds)}; the local engine serves "
            "full_attention only",
            code="unsupported_model",
        )
    _check_rope(hf_config)


def _check_rope(hf_config: Any) -> None:
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _STABLE_ROPE:
        raise EngineSetupError(
            f"rope type {kind!r} changes with the longest request of a batch; "
            f"served are {', '.join(sorted(_STABLE_ROPE))}",
            code="unsupported_model",
        )


def _build(hf_config: Any, config: EngineConfig) -> torch.nn.Module:
    build: Any = AutoModelForCausalLM.from_config
    module: torch.nn.Module = build(
        hf_config,
        dtype=TORCH_DTYPE[config.dtype],
        attn_implementation=ATTENTION_NAME,
        experts_implementation=config.experts_implementation,
    )
    return module.eval().requires_grad_(False)


def _kv_layout(hf_config: Any, dtype: torch.dtype) -> KVLayout:
    heads = int(hf_config.num_attention_heads)
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    return KVLayout(int(hf_config.num_hidden_layers), int(kv_heads), int(head_dim), dtype)


def _max_context(hf_config: Any, config: EngineConfig) -> int:
    limit = int(hf_config.max_position_embeddings)
    if config.max_context is not None and config.max_context > limit:
        raise EngineSetupError(
            f"engine.max_context is {config.max_context}; the model was built for {limit} positions", code="max_context"
        )
    return config.max_context or min(limit, DEFAULT_CONTEXT)


def _eos_ids(model_dir: Path, hf_config: Any) -> frozenset[int]:
    path = model_dir / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    found = generation.get("eos_token_id", getattr(hf_config, "eos_token_id", None))
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _load_detokenizer(model_dir: Path) -> Detokenize | None:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # ships with transformers; only folders with a tokenizer need it

    tokenizer = Tokenizer.from_file(str(path))

    def detokenize(ids: Sequence[int], skip_special: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    return detokenize
