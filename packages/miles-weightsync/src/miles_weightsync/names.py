"""Tensor names: which are acceptable, to which phase and layer they belong, and their one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

from miles_weightsync.errors import NameSetError, TensorError

Phase = Literal["non_expert", "expert"]

MAX_NAME_BYTES = 512
_DELETE = 0x7F


def check_name(name: str) -> str:
    """Return `name`, 1 to 512 UTF-8 bytes without path or control characters. Raises TensorError (code `name`)."""
    if not isinstance(name, str) or not 1 <= _utf8_length(name) <= MAX_NAME_BYTES:
        raise TensorError("name", f"tensor name {name!r:.80} must be text of 1 to {MAX_NAME_BYTES} UTF-8 bytes")
    if name in (".", "..") or any(c in "/\\" or ord(c) < 0x20 or ord(c) == _DELETE for c in name):
        raise TensorError("name", f"tensor name {name!r:.80} holds a path or control character")
    return name


def _utf8_length(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form
        return 0


def is_routed_expert(name: str) -> bool:
    """True for tensors of routed experts; shared experts belong to the non-expert phase."""
    return ".experts." in name and ".shared_experts." not in name


def phase_of(name: str) -> Phase:
    """The phase in which a tensor is sent."""
    return "expert" if is_routed_expert(name) else "non_expert"


def layer_of(name: str) -> int:
    """The number of the first `layers.<digits>.` pair of segments, -1 without one."""
    segments = name.split(".")
    for word, number in pairwise(segments[:-1]):
        if word == "layers" and number.isascii() and number.isdigit():
            return int(number)
    return -1


def canonical_key(name: str) -> tuple[bool, int, str]:
    """Sort key of the canonical order: phase, layer, name by code point."""
    return is_routed_expert(name), layer_of(name), name


def canonical_order(names: Sequence[str]) -> list[int]:
    """The permutation that sorts `names` canonically, as indices into `names`."""
    return sorted(range(len(names)), key=lambda i: canonical_key(names[i]))


def check_names(expected: Iterable[str], sent: Iterable[str]) -> None:
    """Raise NameSetError, listing every name, unless each expected name is sent exactly once and no other is."""
    wanted, counts = set(expected), Counter(sent)
    missing = wanted - counts.keys()
    extra = counts.keys() - wanted
    duplicate = [name for name, count in counts.items() if count > 1]
    if missing or extra or duplicate:
        raise NameSetError(sorted(missing), sorted(extra), duplicate)
