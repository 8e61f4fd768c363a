"""The FSDP2 backend: fp32 parameters sharded over the ranks of a gloo group.

With one rank no process group is formed and the parameters are plain tensors; the numbers are the same.

Shapes: P predictions of a micro-batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from miles_trainer.config import FsdpConfig, OptimizerConfig
from miles_trainer.distributed import RankGroup
from miles_trainer.errors import ModelError
from miles_trainer.micro_batch import MicroBatch
from miles_trainer.optim import UpdateOutcome, build_adamw, clipped_update
from miles_trainer.protocols import Numerics


def shard_model(model: torch.nn.Module, mesh: DeviceMesh, config: FsdpConfig) -> torch.nn.Module:
    """`fully_shard` on each block that transformers keeps together, then on the rest."""
    blocks = set(cast("Any", model)._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; a collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, sharded as `like` is; no communication."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


class PackedModel:
    """A model that runs micro-batches. Used for the policy and, frozen, for the reference."""

    def __init__(self, model: torch.nn.Module, group: RankGroup, config: FsdpConfig, numerics: Numerics | None) -> None:
        self._numerics = numerics
        if group.world_size > 1:
            model = shard_model(model, init_device_mesh("cpu", (group.world_size,)), config)
        self.module = model

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Logits at the kept positions, [P, V] fp32 (one row for a filler)."""
        with self._numerics.forward() if self._numerics is not None else nullcontext():
            output = self.module(
                input_ids=micro_batch.input_ids,
                position_ids=micro_batch.positions,
                use_cache=False,
                logits_to_keep=micro_batch.keep,
                segments=micro_batch.segments,
                numerics=self._numerics,
            )
        return cast("torch.Tensor", output.logits[0])


class Fsdp2Backend:
    """The policy model, its gradients and its AdamW state."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: RankGroup,
        config: FsdpConfig,
        optimizer: OptimizerConfig,
        *,
        numerics: Numerics | None = None,
    ) -> None:
        self.packed = PackedModel(model, group, config, numerics)
        self._world_size = group.world_size
        self._options = optimizer
        self.parameters = dict(self.packed.module.named_parameters())
        if not self.parameters:
            raise ModelError("the model has no parameters to train")
        self.optimizer = build_adamw(self.parameters.values(), optimizer)

    @property
    def module(self) -> torch.nn.Module:
        return self.packed.module

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Logits at the kept positions, [P, V] fp32."""
        return self.packed.logits(micro_batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the step's loss; gradients are sums over ranks.

        FSDP2 averages over ranks and gloo has no way to change its divisor, so the loss is multiplied by their number
        instead.
        """
        (loss * self._world_size).backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float) -> UpdateOutcome:
        """Clip the gradients to the norm bound and step AdamW; on a non-finite norm change nothing. Gradients are
        cleared.
        """
        return clipped_update(self.optimizer, clip_grad_norm=self._options.clip_grad_norm, learning_rate=learning_rate)

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """AdamW's `exp_avg` and `exp_avg_sq` by parameter name, sharded; empty before the first step."""
        state = self.optimizer.state
        return {
            kind: {name: state[p][kind] for name, p in self.parameters.items() if kind in state.get(p, {})}
            for kind in ("exp_avg", "exp_avg_sq")
        }

    def load_parameters(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Overwrite parameters with whole tensors by name."""
        with torch.no_grad():
            for name, tensor in tensors:
                parameter = self.parameters[name]
                part = local_part(tensor, parameter)
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(part)

    def load_moments(self, kind: str, tensors: Iterator[tuple[str, torch.Tensor]], steps: int) -> None:
        """Set AdamW's `kind` moments from whole tensors, at `steps` optimizer steps."""
        for name, tensor in tensors:
            parameter = self.parameters[name]
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(float(steps))
            state[kind] = _like(tensor, parameter)


def _like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return tensor.clone()
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
