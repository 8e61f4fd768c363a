"""Weight versions of tokens. 0 is the boot checkpoint; each `Trainer.train` makes the next one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from miles_trainer.errors import SampleError, VersionIdentityError
from miles_trainer.sample import Sample

UNKNOWN_VERSION = -1


def token_versions(sample: Sample) -> NDArray[np.int64]:
    """int64 [T] from the sample's spans; -1 where nothing is known. Raises SampleError when spans do not ascend."""
    versions_T = np.full(len(sample.token_ids), UNKNOWN_VERSION, dtype=np.int64)
    previous = -1
    for start, version in sample.version_spans:
        if not previous < start < len(versions_T):
            raise SampleError(
                f"rollout {sample.rollout_id}: version span starts at {start} after {previous} in {len(versions_T)} "
                "tokens; "
                "starts must ascend within the tokens"
            )
        versions_T[start:] = version
        previous = start
    return versions_T


def check_versions(samples: Iterable[Sample], *, current: int, max_staleness: int | None = None) -> None:
    """Raise VersionIdentityError when a trained token names a version after `current`, or one older than allowed."""
    for sample in samples:
        versions = token_versions(sample)[np.asarray(sample.loss_mask) > 0]
        known = versions[versions != UNKNOWN_VERSION]
        if not len(known):
            continue
        newest, oldest = int(known.max()), int(known.min())
        if newest > current or oldest < 0:
            raise VersionIdentityError(
                f"rollout {sample.rollout_id} has a token labelled version {newest if newest > current else oldest}, "
                "but this "
                f"trainer has published 0 … {current}: the label is wrong, or the trainer resumed from an older "
                "checkpoint"
            )
        if max_staleness is not None and current - oldest > max_staleness:
            raise VersionIdentityError(
                f"rollout {sample.rollout_id} was sampled at version {oldest} and the trainer is at {current}; "
                f"the limit is {max_staleness}: raise the staleness limit or add engines"
            )
