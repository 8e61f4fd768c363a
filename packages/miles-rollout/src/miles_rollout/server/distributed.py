"""Weight broadcast over gloo: groups that stand beside torch's default one, and staging of what arrives.

The peers build their side with the prefixes that `torch.distributed` itself nests for a group created on a
`PrefixStore(group_name, TCPStore(...))`, so stock senders of SGLang's protocol connect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from miles_rollout.local.errors import RequestError, WeightStateError
from miles_rollout.local.store import DTYPE_NAMES, tensor_bytes

MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A received tensor that is not stored yet (`WireTensor`)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group meets and which seat this engine takes; rank 0 is the sender."""

    host: str
    port: int
    rank: int
    world_size: int
    name: str


class BroadcastGroups:
    """The update groups of one engine, by name. Not thread-safe: one control call at a time."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[str, Any] = {}  # ProcessGroupGloo; its stubs lack the collectives

    def join(self, address: GroupAddress) -> None:
        """Connect to all peers. A group of this name that exists is replaced. Raises `WeightStateError`."""
        self._groups.pop(address.name, None)
        try:
            store = TCPStore(address.host, address.port, address.world_size, is_master=False, timeout=self._timeout)
            seats = PrefixStore("cpu/", PrefixStore(f"{address.name}/", PrefixStore(address.name, store)))
            group = ProcessGroupGloo(seats, address.rank, address.world_size, timeout=self._timeout)
        except RuntimeError as error:
            raise WeightStateError(
                f"group {address.name!r} at {address.host}:{address.port} did not form with rank {address.rank} of "
                f"{address.world_size}: {error}",
                code="group_failed",
            ) from error
        self._groups[address.name] = group

    def leave(self, name: str) -> None:
        """Drop a group. Raises `WeightStateError` when there is none of this name."""
        if self._groups.pop(name, None) is None:
            raise WeightStateError(f"there is no group {name!r}", code="no_group")

    def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> dict[str, StagedTensor]:
        """Receive one broadcast a tensor from rank 0, in order. Raises `WeightStateError` when one does not arrive."""
        group = self._groups.get(name)
        if group is None:
            raise WeightStateError(f"there is no group {name!r}: call init_weights_update_group first", code="no_group")
        staging = _staging(names, dtypes, shapes)
        try:
            for tensor in staging.values():
                group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            self._groups.pop(name)
            raise WeightStateError(
                f"the broadcast in group {name!r} failed: {error}", code="broadcast_failed"
            ) from error
        return {n: StagedTensor(DTYPE_NAMES[t.dtype], tuple(t.shape), tensor_bytes(t)) for n, t in staging.items()}


def _staging(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes came", code="invalid_field"
        )
    if len(set(names)) != len(names):
        raise RequestError("a name comes twice", code="invalid_field")
    return {n: _empty(n, d, s) for n, d, s in zip(names, dtypes, shapes, strict=True)}


def _empty(name: str, dtype_name: str, shape: Sequence[int]) -> torch.Tensor:
    dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise RequestError(f"{name} has dtype {dtype_name!r}, which is not known", code="invalid_field")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise RequestError(f"{name} has shape {list(shape)}", code="invalid_field")
    return torch.empty(tuple(shape), dtype=dtype)
