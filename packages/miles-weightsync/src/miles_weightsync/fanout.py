"""Calls to several engines at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

from miles_weightsync.errors import WeightSyncError

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


def fan_out(pool: Executor, targets: Mapping[K, V], call: Callable[[V], R]) -> dict[K, R | WeightSyncError]:
    """Call `call` for every target at once and wait for all; an error of this package is a result."""
    futures = {key: pool.submit(_outcome, call, target) for key, target in targets.items()}
    return {key: future.result() for key, future in futures.items()}


def _outcome(call: Callable[[V], R], target: V) -> R | WeightSyncError:
    try:
        return call(target)
    except WeightSyncError as error:
        return error
