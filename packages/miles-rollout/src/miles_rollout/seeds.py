"""Seeds that depend on names only, so that a trajectory can be drawn again (`contracts/README.md`, section Seeds)."""

from __future__ import annotations

import hashlib

SEPARATOR = "\x1f"
_TOP_BIT_CLEARED = (1 << 63) - 1


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from the parts: the first 8 bytes, little endian, of SHA-256 over them, top bit cleared."""
    text = SEPARATOR.join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & _TOP_BIT_CLEARED


def member_seed(run_seed: int, prompt_id: str, *, epoch: int, attempt: int, member: int) -> int:
    """The seed of one trajectory: `derive_seed(run_seed, prompt_id, attempt, member)` in the first epoch.

    In a later epoch the run seed is `derive_seed(run_seed, "epoch", epoch)` instead: otherwise every pass over the
    data would sample with the same random numbers.
    """
    epoch_seed = run_seed if epoch == 0 else derive_seed(run_seed, "epoch", epoch)
    return derive_seed(epoch_seed, prompt_id, attempt, member)
