"""The exception tree of miles-trainer.

TrainerError
├── TrainerConfigError (ValueError)      options that do not go together
├── SampleError (ValueError)             a sample whose arrays contradict each other or the model
├── GroupError (ValueError)              group or rollout ids that cannot be normalised
├── ReplayError (ValueError)             expert rows that do not fit the model; `code` names the rule
├── VersionIdentityError (ValueError)    a token labelled with a version this trainer never published
├── ModelError (ValueError)              a model folder that cannot be trained
├── ExportError (ValueError)             names or number formats that cannot be exported
├── CheckpointError (ValueError)         a checkpoint that is absent, incomplete, altered or of another run
├── SourceError (ValueError)             training data that cannot be read; names the line
├── RankError (RuntimeError)             another rank failed or the group could not be formed
└── NotBuiltError (NotImplementedError)  asked for something this release does not have
"""

from __future__ import annotations


class TrainerError(Exception):
    """Root of everything miles-trainer raises on purpose."""


class TrainerConfigError(TrainerError, ValueError):
    """Options that exclude each other, or one that lacks what it needs."""


class SampleError(TrainerError, ValueError):
    """A sample whose arrays contradict each other or the model."""


class GroupError(TrainerError, ValueError):
    """Group or rollout ids that cannot be normalised together."""


class ReplayError(TrainerError, ValueError):
    """Expert rows that do not fit. `code` is stable: rows, layers, top_k, index, duplicate, shape, base64, …"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class VersionIdentityError(TrainerError, ValueError):
    """A token is labelled with a weight version that this trainer has not published."""


class ModelError(TrainerError, ValueError):
    """A model folder that cannot be loaded or trained."""


class ExportError(TrainerError, ValueError):
    """Names or number formats that cannot be exported."""


class CheckpointError(TrainerError, ValueError):
    """A checkpoint that is absent, incomplete, altered, or written by another configuration."""


class SourceError(TrainerError, ValueError):
    """Training data that cannot be read."""


class RankError(TrainerError, RuntimeError):
    """The rank group could not be formed, or another rank failed."""


class NotBuiltError(TrainerError, NotImplementedError):
    """A feature this release does not have."""


class ObjectiveWarning(UserWarning):
    """An objective that is accepted but probably does not do what one expects."""
