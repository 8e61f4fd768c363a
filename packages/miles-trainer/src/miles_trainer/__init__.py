"""miles-trainer: packed batches, GRPO and its corrections, routing replay, FSDP2, checkpoints, export of named full
tensors.

Names are loaded when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from miles_trainer.config import (
    CheckpointConfig,
    FsdpConfig,
    KlConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PackingConfig,
    ReplayConfig,
    TisConfig,
    TrainerConfig,
)
from miles_trainer.errors import (
    CheckpointError,
    ExportError,
    GroupError,
    ModelError,
    NotBuiltError,
    ObjectiveWarning,
    RankError,
    ReplayError,
    SampleError,
    SourceError,
    TrainerConfigError,
    TrainerError,
    VersionIdentityError,
)
from miles_trainer.protocols import BatchSource, Meter, Numerics, Quantizer
from miles_trainer.sample import RoutedExperts, Sample

if TYPE_CHECKING:
    from miles_trainer.export import ExportTensor, HfWeights
    from miles_trainer.report import StepReport
    from miles_trainer.sources import JsonlSource, SyntheticSource
    from miles_trainer.trainer import Trainer
    from miles_trainer.versions import check_versions

_LAZY = {
    "ExportTensor": "export",
    "HfWeights": "export",
    "JsonlSource": "sources",
    "StepReport": "report",
    "SyntheticSource": "sources",
    "Trainer": "trainer",
    "check_versions": "versions",
}

__all__ = [
    "BatchSource",
    "CheckpointConfig",
    "CheckpointError",
    "ExportError",
    "ExportTensor",
    "FsdpConfig",
    "GroupError",
    "HfWeights",
    "JsonlSource",
    "KlConfig",
    "Meter",
    "ModelError",
    "NotBuiltError",
    "Numerics",
    "ObjectiveConfig",
    "ObjectiveWarning",
    "OptimizerConfig",
    "PackingConfig",
    "Quantizer",
    "RankError",
    "ReplayConfig",
    "ReplayError",
    "RoutedExperts",
    "Sample",
    "SampleError",
    "SourceError",
    "StepReport",
    "SyntheticSource",
    "TisConfig",
    "Trainer",
    "TrainerConfig",
    "TrainerConfigError",
    "TrainerError",
    "VersionIdentityError",
    "check_versions",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'miles_trainer' has no attribute {name!r}")
    return getattr(import_module(f"miles_trainer.{_LAZY[name]}"), name)
