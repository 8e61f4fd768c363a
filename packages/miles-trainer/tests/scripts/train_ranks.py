"""RANK WORLD_SIZE INIT_METHOD MODEL OUT CONFIG_JSON RESUME: two steps, a checkpoint each, an export; prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from miles_trainer import Trainer, TrainerConfig
from miles_trainer.testing import agreeing_routes, make_branching_samples

torch.set_num_threads(1)
rank, world_size, address, model, out, config, resume = sys.argv[1:]
options = TrainerConfig.model_validate_json(config)
with Trainer(options, Path(model), rank=int(rank), world_size=int(world_size), init_method=address) as trainer:
    if resume:
        print(json.dumps({"extra": trainer.load(Path(resume))}))
    while trainer.version < 2:
        samples = make_branching_samples(groups=3, members=3, seed=trainer.version, version=trainer.version)
        if options.replay.enabled:
            samples = [replace(s, routed_experts=r) for s, r in zip(samples, agreeing_routes(samples), strict=True)]
        report = trainer.train(samples, step=trainer.version)
        metrics = {name: value for name, value in report.metrics.items() if not name.startswith("perf/")}
        print(json.dumps({"metrics": metrics}))
        trainer.save(Path(out), extra={"drawn": trainer.version})
    scores = trainer.score(samples)
    print(json.dumps({"scores": [score.tolist() for score in scores]}))
    trainer.export("F32").save_hf(Path(out) / "hf")
    print(json.dumps({"lists": [len(unit) for unit in trainer.export().units()]}))
