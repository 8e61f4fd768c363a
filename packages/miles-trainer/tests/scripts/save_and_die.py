"""MODEL FOLDER POINT: save version 1, then die by SIGKILL at a point of the next save."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from miles_trainer import Trainer, TrainerConfig
from miles_trainer.testing import make_samples

torch.set_num_threads(1)
model, folder, point = sys.argv[1:]


def die_at(event: str) -> None:
    if event == point:
        os.kill(os.getpid(), signal.SIGKILL)


with Trainer(TrainerConfig(), Path(model)) as trainer:
    trainer.train(make_samples(), step=0)
    trainer.save(Path(folder))
    if point != "set aside":  # that point is in replacing a version
        trainer.train(make_samples(version=1), step=1)
    trainer.save(Path(folder), on_event=die_at)
