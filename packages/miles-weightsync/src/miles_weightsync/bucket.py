"""Buckets: which tensors travel together, and where each lies in the flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miles_weightsync.errors import LayoutError, UnitError
from miles_weightsync.names import Phase, canonical_order, phase_of
from miles_weightsync.tensors import item_nbytes

ALIGNMENT = 256
"""Each tensor of a flat buffer starts at a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class BucketItem:
    """A tensor to plan: its name, its bytes on the wire, and the load unit it must travel with, if any."""

    name: str
    nbytes: int
    unit: str | None = None


def plan_buckets(
    items: Sequence[BucketItem],
    capacity: int,
    *,
    ep_size: int = 1,
    order: Literal["given", "canonical"] = "given",
) -> list[list[int]]:
    """Split tensors into buckets; the result holds indices into `items`.

    Non-expert tensors come first and never share a bucket with experts. A bucket is closed before a unit that would
    push its bytes (times `ep_size` among experts) above `capacity` bytes; a larger unit travels alone. Gaps of the flat
    layout do not count. Raises UnitError (code `unit`) when a unit holds tensors of both phases.
    """
    sequence = canonical_order([item.name for item in items]) if order == "canonical" else range(len(items))
    units = _units(items, sequence)
    phases: tuple[tuple[Phase, int], ...] = (("non_expert", 1), ("expert", ep_size))
    buckets: list[list[int]] = []
    for phase, multiple in phases:
        buckets += _fill([u for u in units if _unit_phase(items, u) == phase], items, capacity, multiple)
    return buckets


def _units(items: Sequence[BucketItem], sequence: Sequence[int]) -> list[list[int]]:
    units: dict[str | int, list[int]] = {}
    for index in sequence:
        unit = items[index].unit
        units.setdefault(index if unit is None else unit, []).append(index)
    return list(units.values())


def _unit_phase(items: Sequence[BucketItem], unit: list[int]) -> Phase:
    phases = {phase_of(items[index].name) for index in unit}
    if len(phases) > 1:
        names = [items[index].name for index in unit]
        raise UnitError("unit", f"a load unit mixes expert and other tensors: {', '.join(names)}", names)
    return phases.pop()


def _fill(units: list[list[int]], items: Sequence[BucketItem], capacity: int, multiple: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    filled = 0
    for unit in units:
        nbytes = sum(items[index].nbytes for index in unit)
        if not buckets or (filled + nbytes) * multiple > capacity:
            buckets.append([])
            filled = 0
        buckets[-1] += unit
        filled += nbytes
    return buckets


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment` at or above `offset`."""
    return -(-offset // alignment) * alignment


def layout(sizes: Sequence[int], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Byte offsets of tensors of these sizes in a flat buffer, and its length. No padding follows the last tensor."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(align(end, alignment))
        end = offsets[-1] + nbytes
    return offsets, end


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Tensors without gaps: `order` holds indices of the input, `offsets` follow that order."""

    order: list[int]
    offsets: list[int]
    total: int


def layout_packed(tensors: Sequence[tuple[str, int]], *, sort: bool) -> PackedLayout:
    """Lay (dtype, nbytes) out without padding, as SGLang's flattened bucket does.

    With `sort`, by descending item size (stable), which keeps every offset a multiple of its item size.
    Raises LayoutError (code `misaligned`) where an offset is none.
    """
    order = list(range(len(tensors)))
    if sort:
        order.sort(key=lambda index: -item_nbytes(tensors[index][0]))
    offsets, end = [], 0
    for index in order:
        dtype, nbytes = tensors[index]
        if end % item_nbytes(dtype):
            raise LayoutError("misaligned", f"offset {end} is no multiple of the item size of {dtype}: sort the bucket")
        offsets.append(end)
        end += nbytes
    return PackedLayout(order, offsets, end)
