"""The ranks of one trainer: a gloo process group, or nothing at all with one rank."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from miles_trainer.errors import RankError


class RankGroup:
    """Collectives over the trainer's ranks. One rank alone forms no process group: each call returns its input."""

    def __init__(self, rank: int = 0, world_size: int = 1, *, init_method: str | None = None, timeout_s: float) -> None:
        """Join the group. `init_method` is torch's address of rank 0, `tcp://127.0.0.1:29500`, needed with several
        ranks.

        Raises RankError when the group does not form within `timeout_s` seconds.
        """
        if not 0 <= rank < world_size:
            raise RankError(f"rank {rank} is outside 0 … {world_size - 1}: start ranks 0 to world_size - 1")
        self.rank, self.world_size = rank, world_size
        self._owns_group = world_size > 1
        if self._owns_group:
            self._join(init_method, timeout_s)

    def _join(self, init_method: str | None, timeout_s: float) -> None:
        if init_method is None:
            raise RankError(f"{self.world_size} ranks need init_method, for example tcp://127.0.0.1:29500")
        try:
            dist.init_process_group(
                "gloo",
                init_method=init_method,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} of {self.world_size} could not join {init_method} within {timeout_s:g} s: {error}"
            ) from error

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place on a tensor of any shape."""
        if self._owns_group:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def gather_bytes(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The uint8 tensor of every rank (equal shapes), in rank order, on every rank."""
        if not self._owns_group:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return parts

    def agree(self, error: Exception | None, what: str) -> None:
        """Raise on every rank when one failed: its own error there, RankError elsewhere."""
        failed = self.sum(torch.tensor([0 if error is None else 1], dtype=torch.int64))
        if error is not None:
            raise error
        if int(failed):
            raise RankError(f"{int(failed)} of {self.world_size} ranks failed to {what}: their logs have the reason")

    def close(self) -> None:
        """Leave the group."""
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            dist.destroy_process_group()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
