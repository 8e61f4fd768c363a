"""Checkpoints: safetensors and JSON, complete or not there.

    <folder>/step_0000004/
        model.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors   whole fp32 tensors by parameter name
        random.safetensors                                               torch's generator state by rank
        state.json                                                       counters, options, digests of the files above
        .complete                                                        written last

A checkpoint is written under another name, synced to disk and renamed, so that a crash at any point leaves the last one
as it was. Tensors are whole, so the number of ranks may change between saving and loading.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from miles_trainer.backends.fsdp2 import full
from miles_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from miles_trainer.trainer import Trainer

SCHEMA = "miles-trainer-checkpoint/1"
MARKER = ".complete"
SET_ASIDE = ".replaced-"
MOMENTS = ("exp_avg", "exp_avg_sq")

OnEvent = Callable[[str], None]


def step_folder(version: int) -> str:
    """Folder name of the checkpoint of a weight version."""
    return f"step_{version:07d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first. Leftovers of interrupted saves are not among them.

    One that was set aside by a save that died before its replacement was in place still counts.
    """
    found = {path.name: path for path in folder.glob(f"{SET_ASIDE}step_*") if (path / MARKER).is_file()}
    by_step = {name.removeprefix(SET_ASIDE): path for name, path in found.items()}
    by_step |= {path.name: path for path in folder.glob("step_*") if (path / MARKER).is_file()}
    return [by_step[name] for name in sorted(by_step)]


def latest(folder: Path) -> Path:
    """The newest complete checkpoint. Raises CheckpointError when there is none."""
    found = complete_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: name the folder that a run saved to, or start a new run"
        )
    return found[-1]


# Saving


def save(
    trainer: Trainer, folder: Path, *, extra: Mapping[str, Any] | None = None, on_event: OnEvent | None = None
) -> Path:
    """Write the trainer's state; collective. `on_event` hears the name of each file once it is on disk.

    Raises CheckpointError on every rank when writing failed; nothing that was complete is touched then.
    """
    target = folder / step_folder(trainer.version)
    writer = _Writer(target, on_event or (lambda _: None)) if trainer.group.rank == 0 else None
    error: CheckpointError | None = None
    for name, tensors in _tensor_files(trainer):
        if writer is not None and error is None:
            error = writer.attempt(name, tensors)
    if writer is not None and error is None:
        error = writer.finish(_state(trainer, extra or {}), keep=trainer.config.checkpoint.keep)
    trainer.group.agree(error, f"save {target}")
    return target


def _tensor_files(trainer: Trainer) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """File name → whole tensors. Gathering is collective; ranks other than 0 get empty ones."""
    source = trainer.group.rank == 0
    yield "model", _gather(trainer.backend.parameters, source)
    for kind, moments in trainer.backend.moments().items():
        yield kind, _gather(moments, source)
    states = trainer.group.gather_bytes(torch.get_rng_state())
    yield "random", {f"rank{rank}": state for rank, state in enumerate(states)} if source else {}


def _gather(tensors: Mapping[str, torch.Tensor], source: bool) -> dict[str, torch.Tensor]:
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = full(tensor.detach())
        if source:
            gathered[name] = whole.contiguous()
    return gathered


def _state(trainer: Trainer, extra: Mapping[str, Any]) -> dict[str, Any]:
    state = trainer.state
    return {
        "schema": SCHEMA,
        "version": state.version,
        "updates": state.updates,
        "skipped": state.skipped,
        "config_digest": trainer.config.digest(),
        "config": trainer.config.training_options(),
        "world_size": trainer.group.world_size,
        "extra": dict(extra),
    }


class _Writer:
    """Writes one checkpoint on rank 0."""

    def __init__(self, target: Path, on_event: OnEvent) -> None:
        self._target, self._on_event = target, on_event
        self._staging = target.with_name(f".writing-{target.name}")
        self._files: dict[str, dict[str, Any]] = {}

    def attempt(self, name: str, tensors: dict[str, torch.Tensor]) -> CheckpointError | None:
        """Write one safetensors file; the error, if any, is for the caller to agree on with the other ranks."""
        try:
            self._write_tensors(name, tensors)
        except (OSError, SafetensorError) as error:
            return CheckpointError(f"{self._staging} could not be written: {error}")
        return None

    def _write_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if not self._files:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(parents=True)
        path = self._staging / f"{name}.safetensors"
        save_file(tensors, path)
        _sync(path)
        self._files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        self._on_event(path.name)

    def finish(self, state: dict[str, Any], *, keep: int) -> CheckpointError | None:
        """State, marker, rename; then old checkpoints beyond `keep` go."""
        try:
            self._write_text("state.json", json.dumps({**state, "files": self._files}, indent=1, sort_keys=True))
            self._write_text(MARKER, SCHEMA + "\n")
            _sync(self._staging)
            self._rename()
            for old in complete_checkpoints(self._target.parent)[:-keep]:
                shutil.rmtree(old)
        except (OSError, TypeError, ValueError) as error:
            return CheckpointError(f"{self._target} could not be written: {error}")
        return None

    def _write_text(self, name: str, text: str) -> None:
        path = self._staging / name
        path.write_text(text, encoding="utf-8")
        _sync(path)
        self._on_event(name)

    def _rename(self) -> None:
        aside = self._target.with_name(f"{SET_ASIDE}{self._target.name}")
        if self._target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self._target.rename(aside)
            self._on_event("set aside")
        self._staging.rename(self._target)
        _sync(self._target.parent)
        self._on_event("renamed")
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Loading


def load(trainer: Trainer, path: Path, *, allow_config_change: bool = False) -> Mapping[str, Any]:
    """Restore a checkpoint, or the newest one of a folder of them; returns the `extra` of the save.

    Every file's digest is checked before anything is changed. Raises CheckpointError when the checkpoint is absent,
    incomplete or altered, is of another model, or was written under other options (unless `allow_config_change`).
    """
    error: CheckpointError | None = None
    extra: Mapping[str, Any] = {}
    try:
        extra = _load(trainer, path, allow_config_change)
    except CheckpointError as failed:
        error = failed
    trainer.group.agree(error, f"load {path}")
    return extra


def _load(trainer: Trainer, path: Path, allow_config_change: bool) -> Mapping[str, Any]:
    source = path if (path / MARKER).is_file() or (path / "state.json").is_file() else latest(path)
    state = read_state(source)
    if not allow_config_change:
        _check_config(trainer, state)
    _check_tensors(trainer, source, state)
    trainer.backend.load_parameters(iter(load_file(source / "model.safetensors").items()))
    trainer.backend.optimizer.state.clear()
    for kind in MOMENTS:
        moments = load_file(source / f"{kind}.safetensors")
        trainer.backend.load_moments(kind, iter(moments.items()), state["updates"])
    counters = trainer.state
    counters.version, counters.updates, counters.skipped = state["version"], state["updates"], state["skipped"]
    _restore_random(trainer, load_file(source / "random.safetensors"))
    extra: Mapping[str, Any] = state["extra"]
    return extra


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a complete checkpoint whose files are all as they were written."""
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint (no {MARKER}): take an earlier one")
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'state.json'} cannot be read: {error}") from error
    if state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path} has schema {state.get('schema')!r}; this release reads {SCHEMA!r}")
    for name, entry in state["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _digest(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is missing or not what was written: take an earlier checkpoint")
    return state


def _check_config(trainer: Trainer, state: Mapping[str, Any]) -> None:
    if state["config_digest"] == trainer.config.digest():
        return
    saved, ours = _flat(state["config"]), _flat(trainer.config.training_options())
    changed = [
        f"{key}: {saved.get(key)} → {ours.get(key)}" for key in sorted(saved | ours) if saved.get(key) != ours.get(key)
    ]
    raise CheckpointError(
        f"the checkpoint was written under other options ({'; '.join(changed)}): restore them, or allow the change "
        "explicitly"
    )


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _check_tensors(trainer: Trainer, path: Path, state: Mapping[str, Any]) -> None:
    expected = {name: list(p.shape) for name, p in trainer.backend.parameters.items()}
    for kind in ("model", *(MOMENTS if state["updates"] else ())):
        found = _shapes(path / f"{kind}.safetensors")
        if found != expected:
            names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise CheckpointError(
                f"{path / kind}: {len(names)} tensors differ from the model, first {names[0]}: saved shape "
                f"{found.get(names[0])}, "
                f"model {expected.get(names[0])}"
            )


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, framework="pt") as opened:
        return {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _restore_random(trainer: Trainer, states: Mapping[str, torch.Tensor]) -> None:
    """Each rank's generator; ranks that the save did not have start from the seed and their number."""
    own = states.get(f"rank{trainer.group.rank}")
    if own is None:
        torch.manual_seed(trainer.config.seed + trainer.group.rank)
    else:
        torch.set_rng_state(own)
