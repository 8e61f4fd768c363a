"""The weight port: names, bytes and order of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_rollout.local import (
    EngineBusyError,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    WeightStateError,
    WeightTensorError,
)
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.store import tensor_bytes
from miles_rollout.local.testing import SteppedEngine, checkpoint_tensors, wire_tensor
from miles_rollout.protocols import WeightFormat, WeightPort


def test_the_port_satisfies_the_protocol(dense_folder: Path) -> None:
    assert isinstance(LocalEngine(dense_folder, EngineConfig()).port, WeightPort)


def test_expected_tensors_are_those_of_the_checkpoint(folder: Path) -> None:
    described = LocalEngine(folder, EngineConfig(), name="e", epoch=4).port.describe()
    saved = load_file(folder / "model.safetensors")
    assert {s.name: s.shape for s in described.expected_tensors} == {n: tuple(t.shape) for n, t in saved.items()}
    assert {s.dtype for s in described.expected_tensors} == {"F32"}
    assert (described.engine_id, described.epoch, described.version) == ("e:4", 4, 0)


def test_each_tensor_reads_back_as_saved(folder: Path) -> None:
    port = LocalEngine(folder, EngineConfig()).port
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert bytes(port.read(name)) == bytes(tensor_bytes(tensor)), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loaded_bytes_are_the_bytes_that_are_read(moe_folder: Path, moe_folder_next: Path, dtype: str) -> None:
    config = EngineConfig.model_validate({"dtype": dtype})
    engine = SteppedEngine(moe_folder, config)
    tensors = checkpoint_tensors(moe_folder_next, config)
    engine.port.pause("retract")
    engine.update(tensors, 1)
    assert all(engine.port.read(name) == tensor.data for name, tensor in tensors.items())
    assert engine.port.describe().version == 1
    with pytest.raises(TypeError):
        engine.port.read("model.norm.weight")[0] = 1


def test_one_expert_changes_only_its_own_bytes(moe_folder: Path) -> None:
    engine = SteppedEngine(moe_folder)
    before = checkpoint_tensors(moe_folder)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    engine.port.pause("retract")
    engine.update({name: wire_tensor(torch.full((16, 32), 0.5))}, 1)
    changed = [n for n, tensor in before.items() if engine.port.read(n) != tensor.data]
    assert changed == [name]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"model.layers.9.oops.weight": torch.zeros(2)}, "no tensor 'model.layers.9.oops.weight'"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.bfloat16)}, "model.norm.weight came as BF16"),
        ({"model.norm.weight": torch.zeros(31)}, r"model.norm.weight came as F32 \[31\]"),
        ({"lm_head.weight": torch.zeros(259, 32)}, "no tensor 'lm_head.weight'"),
    ],
)
def test_a_bad_tensor_is_named_and_nothing_is_stored(
    dense_folder: Path, bad: Mapping[str, torch.Tensor], complaint: str
) -> None:
    engine = SteppedEngine(dense_folder)
    engine.port.pause("retract")
    engine.port.begin("s", 1)
    good = {"model.embed_tokens.weight": wire_tensor(torch.zeros(259, 32))}
    with pytest.raises(WeightTensorError, match=complaint):
        engine.port.load(good | {name: wire_tensor(tensor) for name, tensor in bad.items()})
    assert all(engine.port.read(name) == tensor.data for name, tensor in checkpoint_tensors(dense_folder).items())
    engine.port.abort()
    engine.port.resume()


def test_too_few_bytes_are_refused(dense_folder: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.port.pause("retract")
    engine.port.begin("s", 1)
    short = replace(wire_tensor(torch.zeros(32)), data=memoryview(bytes(100)))
    with pytest.raises(WeightTensorError, match="came with 100 bytes; 128 were expected"):
        engine.port.load({"model.norm.weight": short})


def test_calls_out_of_order_are_refused(dense_folder: Path) -> None:
    engine, one = SteppedEngine(dense_folder), {"model.norm.weight": wire_tensor(torch.ones(32))}
    port = engine.port
    with pytest.raises(WeightStateError, match="pause it first"):
        port.begin("s", 1)
    port.pause("retract")
    with pytest.raises(WeightStateError, match="no update session"):
        port.load(one)
    with pytest.raises(WeightStateError, match="does not follow 0"):
        port.begin("s", 0)
    port.begin("s", 2)
    with pytest.raises(WeightStateError, match="leads to 2"):
        port.commit(3, "")
    port.load(one)
    for refused in (port.abort, port.resume, lambda: port.begin("other", 3)):
        with pytest.raises(WeightStateError):
            refused()
    port.commit(2, "abc")
    assert port.digest == "abc"
    port.resume()


def test_flush_needs_rows_that_nobody_holds(dense_folder: Path) -> None:
    engine = SteppedEngine(dense_folder)
    ids = tuple(range(40))
    engine.add(EngineRequest(ids, SamplingParams(max_new_tokens=5), rid="r"))
    engine.step(2)
    engine.port.pause("in_place")
    with pytest.raises(EngineBusyError, match="1 requests hold rows"):
        engine.port.flush()
    engine.port.pause("retract")
    engine.port.flush()
    assert engine.core.stats().kv_used_tokens == 0
    engine.port.resume()
    engine.finish()
    assert len(engine.reply("r").output_ids) == 5


def test_a_tied_head_follows_the_embeddings(dense_folder: Path) -> None:
    engine = SteppedEngine(dense_folder)
    engine.port.pause("retract")
    engine.update({"model.embed_tokens.weight": wire_tensor(torch.zeros(259, 32))}, 1)
    engine.port.resume()
    engine.add(EngineRequest((1, 2), SamplingParams(max_new_tokens=1, sampling_seed=1), rid="r"))
    engine.finish()
    assert engine.reply("r").output_logprobs[0] == pytest.approx(-np.log(259), abs=1e-6)


class EighthsFormat:
    """A toy number format: int8 counts of a scale per row."""

    def suffixes(self) -> tuple[str, ...]:
        return ("weight", "weight_scale")

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"][:, None]


def encoded_folder(source: Path, target: Path) -> Path:
    tensors = load_file(source / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1) / 127
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensors[name] / scale[:, None]).round().to(torch.int8)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_weight_format_keeps_its_wire_bytes(
    dense_folder: Path, dense_folder_next: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    boot = encoded_folder(dense_folder, tmp_path_factory.mktemp("boot"))
    later = encoded_folder(dense_folder_next, tmp_path_factory.mktemp("later"))
    weight_format: WeightFormat = EighthsFormat()
    engine = LocalEngine(boot, EngineConfig(), weight_format=weight_format)
    wanted = EngineRequest(tuple(range(9)), SamplingParams(max_new_tokens=4, temperature=0.0))
    specs = {s.name: s.dtype for s in engine.port.describe().expected_tensors}
    name = "model.layers.0.mlp.up_proj.weight"
    assert (specs[name], specs[f"{name}_scale"]) == ("I8", "F32")
    encoded = load_file(later / "model.safetensors")
    engine.port.pause("retract")
    engine.port.begin("s", 1)
    with pytest.raises(WeightTensorError, match="make one load unit"):
        engine.port.load({name: wire_tensor(encoded[name])})
    engine.port.load({n: wire_tensor(t) for n, t in encoded.items()})
    engine.port.commit(1, "")
    engine.port.resume()
    assert all(bytes(engine.port.read(n)) == bytes(tensor_bytes(t)) for n, t in encoded.items())
    fresh = LocalEngine(later, EngineConfig(), weight_format=weight_format)
    assert engine.generate_sync([wanted])[0].output_ids == fresh.generate_sync([wanted])[0].output_ids
