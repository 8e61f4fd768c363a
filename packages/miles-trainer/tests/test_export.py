"""Exported tensors: checkpoint names, own bytes, and folders that plain transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from miles_trainer import ExportError, Sample, Trainer, TrainerConfig
from miles_trainer.export import checkpoint_names, export_tensor
from miles_trainer.testing import make_samples

CONFIG = TrainerConfig.model_validate({"optimizer": {"learning_rate": 1e-3}})


def _bytes(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = (entry["dtype"], entry["shape"], data[8 + length + start : 8 + length + end])
    return found


@pytest.mark.parametrize("kind", ["dense_dir", "moe_dir", "untied_dir"])
def test_names_and_boot_bytes_are_those_of_the_checkpoint(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    with Trainer(CONFIG, folder) as trainer:
        units = list(trainer.export("F32").units(0))
        again = [name for unit in trainer.export("F32").units() for name, _ in unit]
    tensors = {name: tensor for unit in units for name, tensor in unit}
    assert [name for unit in units for name, _ in unit] == again
    assert set(tensors) == checkpoint_names(folder)
    for name, (dtype, shape, data) in _bytes(folder).items():
        assert (tensors[name].dtype, list(tensors[name].shape), bytes(tensors[name].data)) == (dtype, shape, data)


def test_a_layer_comes_in_one_list_with_each_expert_cut_out(moe_dir: Path) -> None:
    with Trainer(CONFIG, moe_dir) as trainer:
        units = list(trainer.export().units())
        fused = trainer.backend.parameters["model.layers.1.mlp.experts.gate_up_proj"].detach()
    layer = dict(units[2])
    assert all(name.startswith("model.layers.1.") for name in layer)
    up = layer["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert bytes(up.data) == bytes(fused[5, 16:].bfloat16().contiguous().view(torch.uint8).numpy())


def test_exported_bytes_do_not_change_when_training_goes_on(dense_dir: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        name, tensor = next(iter(trainer.export("F32").units()))[0]
        before = bytes(tensor.data)
        trainer.train(make_samples(), step=0)
        assert bytes(tensor.data) == before
        assert bytes(dict(next(iter(trainer.export("F32").units())))[name].data) != before


def test_formats_may_differ_by_name(dense_dir: Path) -> None:
    chosen = "model.norm.weight"
    with Trainer(CONFIG, dense_dir) as trainer:
        tensors = dict(pair for unit in trainer.export("BF16", dtypes={chosen: "F32"}).units() for pair in unit)
        with pytest.raises(ExportError, match=r"first model\.no_such"):
            trainer.export(dtypes={"model.no_such": "F32"})
    assert {name: t.dtype for name, t in tensors.items() if t.dtype == "F32"} == {chosen: "F32"}


@pytest.mark.parametrize("kind", ["dense_dir", "moe_dir", "untied_dir"])
@pytest.mark.verifies("transformers", "an exported checkpoint loads and holds the exported bytes")
def test_a_saved_folder_loads_in_transformers_and_holds_the_exported_bytes(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    samples = make_samples()
    with Trainer(CONFIG, folder) as trainer:
        trainer.train(samples, step=0)
        trainer.export("BF16").save_hf(tmp_path / "bf16")
        trainer.export("F32").save_hf(tmp_path / "sharded", shard_bytes=20_000)
        exported = {name: bytes(t.data) for unit in trainer.export("BF16").units() for name, t in unit}
        scores = trainer.score(samples)
    assert {name: data for name, (_, _, data) in _bytes(tmp_path / "bf16").items()} == exported
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded", dtype="auto").eval()
    assert plain.dtype == torch.float32
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    np.testing.assert_allclose(_plain_score(plain, samples[0]), scores[0], rtol=1e-5, atol=1e-5)
    with Trainer(CONFIG, tmp_path / "sharded") as again:
        for mine, other in zip(again.score(samples), scores, strict=True):
            assert np.array_equal(mine, other)


def _plain_score(model: torch.nn.Module, sample: Sample) -> np.ndarray:
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].log_softmax(-1)
    return np.concatenate([[0], logits[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()]) * sample.loss_mask


def test_small_files_travel_with_the_weights(dense_dir: Path, tmp_path: Path) -> None:
    with Trainer(CONFIG, dense_dir) as trainer:
        trainer.export().save_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert (tmp_path / "generation_config.json").is_file()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_scalars_and_empty_tensors_are_bytes_too() -> None:
    scalar = export_tensor(torch.tensor(1.5), "F32")
    assert (scalar.shape, bytes(scalar.data)) == ((), torch.tensor(1.5).numpy().tobytes())
    empty = export_tensor(torch.zeros(0, 3), "BF16")
    assert (empty.shape, bytes(empty.data)) == ((0, 3), b"")


def test_names_of_an_unknown_family_are_refused(dense_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in dense_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with Trainer(CONFIG, tmp_path) as trainer:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.foreign.weight"] = torch.zeros(1)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ExportError, match=r"1 missing \(first \['model.foreign.weight'\]\)"):
            trainer.export()


def test_writing_to_a_place_that_cannot_be_written_is_an_error(dense_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with Trainer(CONFIG, dense_dir) as trainer, pytest.raises(ExportError, match="could not be written"):
        trainer.export().save_hf(tmp_path / "file")


def test_version_spans_play_no_part_in_scores(dense_dir: Path) -> None:
    samples = make_samples()
    with Trainer(CONFIG, dense_dir) as trainer:
        for a, b in zip(
            trainer.score(samples), trainer.score([replace(s, version_spans=()) for s in samples]), strict=True
        ):
            assert np.array_equal(a, b)
