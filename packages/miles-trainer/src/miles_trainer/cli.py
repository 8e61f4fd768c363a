"""Command line of the trainer alone: `miles-trainer train | sft | export`."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from pydantic import ValidationError

from miles_trainer.config import TrainerConfig
from miles_trainer.errors import TrainerConfigError, TrainerError

if TYPE_CHECKING:
    from miles_trainer.sample import Sample
    from miles_trainer.sources import JsonlSource
    from miles_trainer.trainer import Trainer

app = App(name="miles-trainer", help="Train a Hugging Face causal language model on recorded trajectories.")


@Parameter(name="*")
class Ranks:
    """Which of how many processes this is."""

    def __init__(self, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        """Keep the place of this process.

        Parameters
        ----------
        rank: this process, from 0
        world_size: processes that train together
        init_method: address of rank 0, for example tcp://127.0.0.1:29500; needed with several processes
        """
        self.rank, self.world_size, self.init_method = rank, world_size, init_method


ONE_RANK = Ranks()


def read_config(path: Path | None) -> TrainerConfig:
    """A TOML file's options over the defaults. Raises TrainerConfigError naming the option."""
    if path is None:
        return TrainerConfig()
    try:
        return TrainerConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors())
        raise TrainerConfigError(f"{path}: {problems}") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TrainerConfigError(f"{path} cannot be read: {error}") from error


@contextmanager
def opened_trainer(config: TrainerConfig, model: Path, ranks: Ranks) -> Iterator[Trainer]:
    """A trainer on one thread; heavy imports happen here and not for `--help`."""
    if ranks.init_method is not None and "//127." in ranks.init_method:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from transformers.utils import logging

    from miles_trainer.trainer import Trainer

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with Trainer(config, model, rank=ranks.rank, world_size=ranks.world_size, init_method=ranks.init_method) as trainer:
        yield trainer


def _batches(source: JsonlSource) -> Iterator[Sequence[Sample]]:
    while (batch := source.next_batch()) is not None:
        yield batch


@app.command
def train(
    config: Path,
    *,
    model: Path,
    data: Path,
    out: Path,
    groups_per_batch: int = 8,
    epochs: int = 1,
    resume: bool = False,
    ranks: Ranks = ONE_RANK,
) -> None:
    """Train on recorded trajectories: one step a batch of groups; writes metrics.jsonl and the trained model.

    Parameters
    ----------
    config: TOML file with the trainer's options
    model: Hugging Face folder to start from
    data: JSONL file of samples
    out: folder for metrics.jsonl and model/
    groups_per_batch: prompt groups of one step
    epochs: passes over the data
    resume: continue from the newest checkpoint in checkpoint.dir; batches already trained are passed over
    """
    from miles_trainer.sources import JsonlSource

    options = read_config(config)
    source = JsonlSource(data, groups_per_batch=groups_per_batch, epochs=epochs)
    with opened_trainer(options, model, ranks) as trainer:
        if resume:
            if options.checkpoint.dir is None:
                raise TrainerConfigError("--resume needs checkpoint.dir: name the folder that the run saved to")
            trainer.load(options.checkpoint.dir)
        done = trainer.version
        for step, batch in enumerate(_batches(source)):
            if step >= done:
                _train_step(trainer, step, batch, out)
        if options.checkpoint.dir is not None:
            trainer.save(options.checkpoint.dir)
        trainer.export().save_hf(out / "model")


def _train_step(trainer: Trainer, step: int, batch: Sequence[Sample], out: Path) -> None:
    report = trainer.train(batch, step=step)
    _append_metrics(trainer, out, {"step": step, **report.metrics})
    options = trainer.config.checkpoint
    if options.dir is not None and options.every_steps and report.version % options.every_steps == 0:
        trainer.save(options.dir)


def _append_metrics(trainer: Trainer, out: Path, values: dict[str, float]) -> None:
    if trainer.group.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        print(
            f"step {values['step']:g}  loss {values['train/loss']:.6f}"
            if "train/loss" in values
            else f"step {values['step']:g}"
        )


@app.command
def sft(
    config: Path,
    *,
    model: Path,
    data: Path,
    out: Path,
    groups_per_batch: int = 8,
    epochs: int = 1,
    ranks: Ranks = ONE_RANK,
) -> None:
    """Supervised steps on the tokens whose loss_mask is 1; writes metrics.jsonl and the trained model.

    Parameters
    ----------
    config: TOML file with the trainer's options
    model: Hugging Face folder to start from
    data: JSONL file of samples
    out: folder for metrics.jsonl and model/
    groups_per_batch: groups of one step
    epochs: passes over the data
    """
    from miles_trainer.sources import JsonlSource

    source = JsonlSource(data, groups_per_batch=groups_per_batch, epochs=epochs)
    with opened_trainer(read_config(config), model, ranks) as trainer:
        for step, batch in enumerate(_batches(source)):
            _append_metrics(trainer, out, {"step": step, "train/loss": trainer.train_supervised(batch)})
        trainer.export().save_hf(out / "model")


@app.command
def export(
    checkpoint: Path, *, model: Path, out: Path, dtype: Annotated[Literal["BF16", "F32"], Parameter()] = "BF16"
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder.

    Parameters
    ----------
    checkpoint: a checkpoint, or a folder of them (the newest is taken)
    model: Hugging Face folder the run started from
    out: folder to write
    dtype: number format of the tensors
    """
    with opened_trainer(TrainerConfig(), model, ONE_RANK) as trainer:
        trainer.load(checkpoint, allow_config_change=True)
        trainer.export(dtype).save_hf(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: one line for a known error, exit code 1. `arguments` default to those of the process."""
    try:
        app(arguments, result_action="return_none")
    except TrainerError as error:
        print(f"miles-trainer: {error}", file=sys.stderr)
        raise SystemExit(1) from None
