"""Three steps of the quick start: identities, agreement of log-probabilities, and the exported checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from miles.layers import Setting, from_file, resolve
from miles.run import default_cache, run_training
from miles.run_folder import read_jsonl
from miles.ui import Silent
from miles.wiring.samples import verified_batch
from miles_trainer import Trainer, TrainerConfig
from miles_weightsync import as_wire, manifest_of

QUICKSTART = Path(__file__).parents[1] / "src" / "miles" / "recipes" / "quickstart.toml"
STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start with small batches. The model comes from the user's cache, where it is fetched once."""
    folder = tmp_path_factory.mktemp("real") / "run"
    small = {
        ("loop", "steps"): STEPS,
        ("task", "held_out"): 6,
        ("rollout", "worker", "batch_groups"): 2,
        ("rollout", "buffer", "max_staleness"): 1,
    }
    settings = [Setting(path, value, "test") for path, value in small.items()]
    asyncio.run(run_training(resolve([*from_file(QUICKSTART), *settings]), folder, Silent()))
    return folder


@pytest.mark.timeout(600)
@pytest.mark.verifies("transformers", "SmolLM2-135M-Instruct is trained in the whole loop")
@pytest.mark.verifies("gguf", "the weights of SmolLM2-135M-Instruct are read from their GGUF file")
def test_the_real_model_trains_with_every_identity_held(run: Path) -> None:
    steps = [row for row in read_jsonl(run / "metrics.jsonl") if "reward/mean" in row]
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["identity/records_verified"] > 0
        assert row["identity/tensors_verified"] == 272
        assert row["identity/versions_checked"] == row["identity/records_verified"]
        assert row["identity/ledger_closed"] == 1
        assert row["tito/hard_mismatches"] == 0
    assert any(row["train/grad_norm"] > 0 for row in steps if "train/grad_norm" in row)


def test_engine_and_trainer_agree_on_the_same_version(run: Path) -> None:
    agreed = [row for row in read_jsonl(run / "metrics.jsonl") if "logprob_diff/mean" in row]
    assert agreed, "no step had tokens of its own version"
    assert all(row["logprob_diff/mean"] <= 1e-5 for row in agreed)
    assert all(row["logprob_diff/max"] <= 1e-3 for row in agreed)


def test_the_saved_checkpoint_is_the_last_version_that_the_engines_verified(run: Path) -> None:
    updates = {e["version"]: e["digest"] for e in read_jsonl(run / "events.jsonl") if e["kind"] == "update"}
    with safe_open(run / "checkpoints" / "hf" / "model.safetensors", framework="pt") as file:
        tensors = [(name, as_wire(file.get_tensor(name))) for name in file.keys()]  # noqa: SIM118  not a mapping
    assert manifest_of(STEPS, tensors).digest == updates[STEPS]


def test_plain_transformers_scores_as_the_trainer_does(run: Path) -> None:
    torch.set_num_threads(1)
    path = next(iter(sorted(run.glob("trajectories/step-000003-*.bin"))))
    sample = verified_batch([path.read_bytes()]).samples[0]
    checkpoint = run / "checkpoints" / "hf"
    with Trainer(TrainerConfig(), checkpoint) as trainer:
        ours = trainer.score([sample])[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    plain = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()
    sampled = sample.loss_mask[1:] == 1
    np.testing.assert_allclose(ours[1:][sampled], plain[sampled], atol=1e-4)


def test_the_model_is_kept_in_the_users_cache(run: Path) -> None:
    (folder,) = default_cache().glob("smollm2-135m-instruct-*")
    assert "Apache-2.0" in (folder / "NOTICE").read_text()
