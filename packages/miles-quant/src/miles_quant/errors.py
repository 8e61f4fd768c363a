"""The exceptions of miles-quant.

QuantError
├── NonFiniteError        (ValueError)   a tensor holds NaN or an infinity
├── QuantShapeError       (ValueError)   a shape or a block size that the format cannot hold
├── QuantDtypeError       (TypeError)    a dtype that the format does not take
├── MissingTensorError    (KeyError)     one of the tensors that make a weight is absent
├── CheckpointFolderError (ValueError)   a folder that holds no readable safetensors
└── GoldenFileError       (ValueError)   a golden file that does not follow its format
"""

from __future__ import annotations


class QuantError(Exception):
    """Root of all errors raised by miles-quant."""


class NonFiniteError(QuantError, ValueError):
    """A tensor holds NaN or an infinity. The message names the tensor, the first index and the value."""


class QuantShapeError(QuantError, ValueError):
    """A shape or a block size that the format cannot hold."""


class QuantDtypeError(QuantError, TypeError):
    """A dtype that the format does not take."""


class MissingTensorError(QuantError, KeyError):
    """One of the tensors that together make a weight is absent."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CheckpointFolderError(QuantError, ValueError):
    """A folder that holds no readable safetensors."""


class GoldenFileError(QuantError, ValueError):
    """A golden file that does not follow the format of its README."""
