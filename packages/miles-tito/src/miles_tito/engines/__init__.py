"""Clients of rollout engines. Each speaks one HTTP API and satisfies `miles_tito.protocols.TokenEngine`."""

from .checks import check_reply
from .sglang import SGLangEngine

__all__ = ["SGLangEngine", "check_reply"]
