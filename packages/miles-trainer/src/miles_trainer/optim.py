"""AdamW with a global norm clip that refuses non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from miles_trainer.config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """`grad_norm` before clipping; `applied` is False when it was not finite and nothing was changed."""

    grad_norm: float
    applied: bool


def build_adamw(parameters: Iterable[torch.Tensor], options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay over one parameter group."""
    return torch.optim.AdamW(
        list(parameters),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
    )


def clipped_update(optimizer: torch.optim.Optimizer, *, clip_grad_norm: float, learning_rate: float) -> UpdateOutcome:
    """Scale gradients by min(1, clip / (norm + 1e-6)), step, clear them. On a non-finite norm only clear them.

    Sharded gradients count with their whole norm; then the call is collective.
    """
    group = optimizer.param_groups[0]
    gradients = [p.grad for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    whole = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    applied = math.isfinite(whole)
    if applied:
        torch.nn.utils.clip_grads_with_norm_(group["params"], clip_grad_norm, torch.tensor(whole, dtype=norm.dtype))
        group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return UpdateOutcome(whole, applied)
