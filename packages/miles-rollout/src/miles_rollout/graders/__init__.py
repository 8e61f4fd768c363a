"""Graders: user functions in killable child processes."""

from __future__ import annotations

from miles_rollout.graders.pool import GraderPool

__all__ = ["GraderPool"]
