"""What quantising gives: the tensors that are stored and sent, with what is needed to read them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from miles_quant.protocols import Format


@dataclass(frozen=True, slots=True)
class Quantized:
    """A tensor in a low-precision format.

    Attributes:
        tensors: name suffix to tensor, as checkpoints name them (`weight`, `weight_scale_inv`).
        format: the format that made it.
        shape: shape of the original tensor.
        dtype: dtype of the original tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
