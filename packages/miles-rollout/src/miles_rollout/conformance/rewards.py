"""Reward vectors. The built-in graders they name are not part of this package yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_rollout.conformance.compare import NotBuiltError


def check_reward(vector: Mapping[str, Any]) -> None:
    """Raise NotBuiltError: there is no built-in grader of any type."""
    raise NotBuiltError(f"grader {vector['rm_type']!r}")
