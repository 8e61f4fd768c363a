"""What miles-trainer needs from outside.

Shapes: Q query tokens, S key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from miles_trainer.sample import Sample


class BatchSource(Protocol):
    """Where training batches come from: groups of the buffer, JSONL, synthetic data."""

    def next_batch(self) -> Sequence[Sample] | None:
        """The samples of the next step, or None at the end."""
        ...


class Quantizer(Protocol):
    """A number format for the forward pass (miles-quant in the full stack): straight-through, bit-exact with the
    rollout.
    """

    def fake_quantize_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor: ...

    def fake_quantize_activation(self, name: str, activation: torch.Tensor) -> torch.Tensor: ...


class Numerics(Protocol):
    """How a forward pass computes. The batch-invariant implementation makes a token's numbers independent of its
    neighbours.
    """

    def forward(self) -> AbstractContextManager[None]:
        """Entered around each forward of the model."""
        ...

    def attend(
        self,
        query_QHD: torch.Tensor,
        key_SGD: torch.Tensor,
        value_SGD: torch.Tensor,
        first_position: int,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of one sequence, [Q, H, D]: query i stands at `first_position + i` and sees keys 0 … that
        position.
        """
        ...


class Meter(Protocol):
    """Receives counters and gauges. The default does nothing."""

    def count(self, name: str, value: float = 1.0) -> None: ...

    def gauge(self, name: str, value: float) -> None: ...
