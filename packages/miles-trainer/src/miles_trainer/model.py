"""Loading of a Hugging Face folder for training: fp32, packed attention, no dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from miles_trainer.attention import ATTENTION_NAME
from miles_trainer.errors import ModelError


def load_model(model_dir: Path) -> torch.nn.Module:
    """The causal language model of a local folder, fp32, in evaluation mode (no dropout), experts looped one by one.

    Raises ModelError when the folder is not one or its attention is not plain causal attention.
    """
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"{model_dir} has no config.json: name a Hugging Face model folder")
    try:
        _check_attention(AutoConfig.from_pretrained(model_dir, local_files_only=True), model_dir)
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            experts_implementation="eager",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{model_dir} cannot be loaded: {error}") from error
    module: torch.nn.Module = model
    return module.eval()


def _check_attention(config: Any, model_dir: Path) -> None:
    """Packed attention is full and causal; a window or a state across tokens would be lost silently."""
    kinds = set(getattr(config, "layer_types", None) or ())
    foreign = sorted(kinds - {"full_attention"})
    windowed = not kinds and getattr(config, "sliding_window", None) is not None
    if foreign or windowed:
        raise ModelError(
            f"{model_dir} has layers of type {', '.join(foreign) or 'sliding_attention'}; this release trains "
            "full_attention only"
        )


def vocabulary_size(model: torch.nn.Module) -> int:
    """Rows of the output embedding."""
    return int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
