"""The exceptions of miles-diffusion.

DiffusionError
├── ScheduleError          (ValueError)   a sigma schedule or a step index that makes no sense
├── LatentError            (ValueError)   latents, velocities or noise of unequal or unusable shapes
├── UndefinedLogProbError  (ValueError)   a density was asked of a step without noise
└── GoldenFileError        (ValueError)   a golden file that cannot be read
"""

from __future__ import annotations


class DiffusionError(Exception):
    """Root of all errors raised by miles-diffusion."""


class ScheduleError(DiffusionError, ValueError):
    """A sigma schedule or a step index that makes no sense."""


class LatentError(DiffusionError, ValueError):
    """Latents, velocities or noise of unequal or unusable shapes."""


class UndefinedLogProbError(DiffusionError, ValueError):
    """A density was asked of a step without noise."""


class GoldenFileError(DiffusionError, ValueError):
    """A golden file that cannot be read."""
