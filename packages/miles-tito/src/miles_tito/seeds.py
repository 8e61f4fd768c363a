"""Seeds that depend on nothing but what they are for (`contracts/README.md`, "Seeds")."""

from __future__ import annotations

import hashlib

SEED_MASK = (1 << 63) - 1


def derive_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits from `parts`: the head of SHA-256 over their texts, joined by the unit separator.

    >>> derive_seed(7, "prompt-3", 0, 1) == derive_seed(7, "prompt-3", 0, 1)
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & SEED_MASK
