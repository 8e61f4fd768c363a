"""Who sends what to whom: the point-to-point plan, the slice table of each engine rank, and the broadcast groups.

Byte ranges: source offsets count from the start of a Hugging Face tensor, destination offsets from the start of the
rank's parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from miles_weightsync.errors import LayoutError
from miles_weightsync.tensors import item_nbytes

Target = tuple[int, int]
"""(engine, rank)."""


def plan_p2p(sources: int, engines: int, ranks_per_engine: int) -> list[list[Target]]:
    """The targets of each source rank, ascending.

    Source i takes target i first. A further target goes to the source that serves its rank with the fewest targets
    (lowest index on ties), so that one resharded buffer serves several engines; where none does, round robin.
    """
    targets = [(engine, rank) for engine in range(engines) for rank in range(ranks_per_engine)]
    plan: list[list[Target]] = [[target] for target in targets[:sources]]
    plan += [[] for _ in range(sources - len(plan))]
    turn = 0
    for target in targets[sources:]:
        serving = [(_serves(plan[s], target[1]), s) for s in range(sources) if _serves(plan[s], target[1])]
        if serving:
            plan[min(serving)[1]].append(target)
        else:
            plan[turn % sources].append(target)
            turn += 1
    return [sorted(row) for row in plan]


def _serves(row: Sequence[Target], rank: int) -> int:
    return sum(1 for _, served in row if served == rank)


@dataclass(frozen=True, slots=True)
class Part:
    """A Hugging Face tensor in an engine parameter. `dim` None: whole on each rank; `shards` defaults to the ranks."""

    hf: str
    shape: tuple[int, ...]
    dim: int | None
    shards: int | None = None


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """An engine parameter made of parts that follow one another; with `experts`, of each expert's parts (`{e}`)."""

    name: str
    dtype: str
    parts: tuple[Part, ...]
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """`nbytes` from `source_offset` of tensor `hf` to `destination_offset` of the parameter."""

    hf: str
    source_offset: int
    destination_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParameterSlices:
    """What one rank's parameter is filled from."""

    nbytes: int
    slices: tuple[Slice, ...]


def slice_table(parameters: Sequence[EngineParameter], *, ranks: int, ep: int = 1) -> list[dict[str, ParameterSlices]]:
    """For each engine rank, the byte ranges of Hugging Face tensors that fill its parameters.

    Raises LayoutError (code `shape`) where a dimension, the experts or the ranks cannot be divided.
    """
    return [{p.name: _rank_slices(p, rank, ranks, ep) for p in parameters} for rank in range(ranks)]


def _rank_slices(parameter: EngineParameter, rank: int, ranks: int, ep: int) -> ParameterSlices:
    item = item_nbytes(parameter.dtype)
    slices: list[Slice] = []
    end = 0
    for hf, start, nbytes in _ranges(parameter, rank, ranks, ep):
        _append_joined(slices, Slice(hf, start * item, end, nbytes * item))
        end += nbytes * item
    return ParameterSlices(end, tuple(slices))


def _append_joined(slices: list[Slice], new: Slice) -> None:
    last = slices[-1] if slices else None
    if last and last.hf == new.hf and last.source_offset + last.nbytes == new.source_offset:
        slices[-1] = Slice(last.hf, last.source_offset, last.destination_offset, last.nbytes + new.nbytes)
    else:
        slices.append(new)


def _ranges(parameter: EngineParameter, rank: int, ranks: int, ep: int) -> Iterator[tuple[str, int, int]]:
    if parameter.experts is None:
        for part in parameter.parts:
            shards = ranks if part.shards is None else part.shards
            yield from _shard_ranges(part, part.hf, rank // _divided(ranks, shards, part.hf), shards)
        return
    width = _divided(ranks, ep, parameter.name)
    local = _divided(parameter.experts, ep, parameter.name)
    first = rank // width * local
    for expert in range(first, first + local):
        for part in parameter.parts:
            yield from _shard_ranges(part, part.hf.replace("{e}", str(expert)), rank % width, width)


def _shard_ranges(part: Part, hf: str, shard: int, shards: int) -> Iterator[tuple[str, int, int]]:
    """(tensor, first element, number of elements) of one shard, row after row where the shards interleave."""
    if part.dim is None:
        yield hf, 0, math.prod(part.shape)
        return
    outer = math.prod(part.shape[: part.dim])
    inner = math.prod(part.shape[part.dim + 1 :])
    width = _divided(part.shape[part.dim], shards, hf) * inner
    for row in range(outer):
        yield hf, (row * shards + shard) * width, width


def _divided(count: int, parts: int, name: str) -> int:
    if parts < 1 or count % parts:
        raise LayoutError("shape", f"{name}: {count} cannot be divided by {parts}", [name])
    return count // parts


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """A process group of one pipeline stage's source (rank 0) and every engine rank."""

    name: str
    world_size: int
    rank_offsets: tuple[int, ...]


def broadcast_groups(pp: int, engine_ranks: Sequence[int]) -> list[BroadcastGroup]:
    """One group a pipeline stage; engine i's ranks start after the source and the ranks of the engines before it."""
    offsets = tuple(1 + sum(engine_ranks[:i]) for i in range(len(engine_ranks)))
    return [BroadcastGroup(f"miles-pp_{stage}", 1 + sum(engine_ranks), offsets) for stage in range(pp)]


def slices_to_json(table: Sequence[Mapping[str, ParameterSlices]]) -> list[dict[str, object]]:
    """The table as plain lists and numbers, the text whose digest identifies a plan."""
    return [
        {
            name: {
                "nbytes": row.nbytes,
                "slices": [[s.hf, s.source_offset, s.destination_offset, s.nbytes] for s in row.slices],
            }
            for name, row in rank.items()
        }
        for rank in table
    ]
