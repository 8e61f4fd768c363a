"""Folders and configurations that cannot be served are refused at the start, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    MambaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3NextConfig,
)

from miles_rollout.local import EngineConfig, EngineRequest, EngineSetupError, RequestError, SamplingParams
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.model import check_family


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Gemma3TextConfig(num_hidden_layers=6), "sliding_attention"),
        (Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
        (DeepseekV3Config(num_hidden_layers=2), "latent attention"),
        (MambaConfig(num_hidden_layers=2), "state space"),
        (Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=0), "sliding_attention"),
        (
            Qwen3Config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope type 'dynamic'",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_families_without_kv_rows_are_named(config: object, kind: str) -> None:
    with pytest.raises(EngineSetupError, match=kind) as refused:
        check_family(config)
    assert refused.value.code == "unsupported_model"


def test_another_full_attention_family_is_served(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    request = EngineRequest((1, 2, 3), SamplingParams(max_new_tokens=4, sampling_seed=1))
    assert len(LocalEngine(tmp_path, EngineConfig()).generate_sync([request])[0].output_ids) == 4


def test_a_budget_that_is_too_small_says_what_is_needed(dense_folder: Path) -> None:
    with pytest.raises(EngineSetupError, match=r"need 2097152 bytes .*budget is 1000000"):
        LocalEngine(dense_folder, EngineConfig(kv_budget_bytes=1_000_000, max_running=16, max_context=512))


def test_a_context_beyond_the_models_is_refused(dense_folder: Path) -> None:
    with pytest.raises(EngineSetupError, match="is 1024; the model was built for 512"):
        LocalEngine(dense_folder, EngineConfig(max_context=1024))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, dense_folder: Path) -> None:
    with pytest.raises(EngineSetupError, match=r"holds no config\.json"):
        LocalEngine(tmp_path, EngineConfig())
    shutil.copy(dense_folder / "config.json", tmp_path)
    with pytest.raises(EngineSetupError, match="neither"):
        LocalEngine(tmp_path, EngineConfig())
    (tmp_path / "model.safetensors").write_bytes((dense_folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(EngineSetupError, match="cannot be read as safetensors"):
        LocalEngine(tmp_path, EngineConfig())


def test_names_that_do_not_fit_the_model_are_listed(tmp_path: Path, dense_folder: Path) -> None:
    shutil.copy(dense_folder / "config.json", tmp_path)
    tensors = load_file(dense_folder / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineSetupError, match=r"missing model\.norm\.weight, unexpected model\.extra\.weight"):
        LocalEngine(tmp_path, EngineConfig())


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path: Path, dense_folder: Path) -> None:
    shutil.copy(dense_folder / "config.json", tmp_path)
    tensors = load_file(dense_folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    LocalEngine(tmp_path, EngineConfig())
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineSetupError, match="is tied to"):
        LocalEngine(tmp_path, EngineConfig())


def test_a_sharded_checkpoint_is_read(tmp_path: Path, dense_folder: Path) -> None:
    shutil.copy(dense_folder / "config.json", tmp_path)
    tensors = load_file(dense_folder / "model.safetensors")
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    port = LocalEngine(tmp_path, EngineConfig()).port
    assert torch.equal(
        torch.frombuffer(bytearray(port.read("model.norm.weight")), dtype=torch.float32), tensors["model.norm.weight"]
    )


def test_stop_strings_need_a_tokenizer(dense_folder_next: Path) -> None:
    request = EngineRequest((1,), SamplingParams(stop=("x",)))
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        LocalEngine(dense_folder_next, EngineConfig()).generate_sync([request])


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_runing"):
        EngineConfig.model_validate({"max_runing": 4})
