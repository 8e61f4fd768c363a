"""miles-rollout: engines' router, the asynchronous worker, the group buffer, graders and the ledger.

Names are loaded when they are first used, so that importing the package imports neither torch nor a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_rollout.agents import chat_request_kwargs as chat_request_kwargs
    from miles_rollout.agents import check_agent as check_agent
    from miles_rollout.agents import load_agent as load_agent
    from miles_rollout.buffer import Buffer as Buffer
    from miles_rollout.buffer import GroupBuffer as GroupBuffer
    from miles_rollout.config import RolloutConfig as RolloutConfig
    from miles_rollout.data import Draw as Draw
    from miles_rollout.data import Frontier as Frontier
    from miles_rollout.data import Prompt as Prompt
    from miles_rollout.data import PromptKey as PromptKey
    from miles_rollout.data import PromptSource as PromptSource
    from miles_rollout.drops import Drop as Drop
    from miles_rollout.drops import DropReason as DropReason
    from miles_rollout.errors import RolloutError as RolloutError
    from miles_rollout.evaluation import EvalResult as EvalResult
    from miles_rollout.evaluation import eval_metrics as eval_metrics
    from miles_rollout.events import EventLog as EventLog
    from miles_rollout.events import read_events as read_events
    from miles_rollout.graders import GraderPool as GraderPool
    from miles_rollout.groups import Group as Group
    from miles_rollout.groups import GroupRecord as GroupRecord
    from miles_rollout.groups import Member as Member
    from miles_rollout.groups import dumps_group as dumps_group
    from miles_rollout.groups import loads_group as loads_group
    from miles_rollout.history import check_history as check_history
    from miles_rollout.ledger import Holdings as Holdings
    from miles_rollout.ledger import Ledger as Ledger
    from miles_rollout.local import EngineConfig as EngineConfig
    from miles_rollout.local import EngineServerConfig as EngineServerConfig
    from miles_rollout.protocols import Grade as Grade
    from miles_rollout.protocols import GradeRequest as GradeRequest
    from miles_rollout.router import create_router_app as create_router_app
    from miles_rollout.router import run_router as run_router
    from miles_rollout.seeds import derive_seed as derive_seed
    from miles_rollout.seeds import member_seed as member_seed
    from miles_rollout.worker import RolloutWorker as RolloutWorker

_HOMES = {
    "agents": "chat_request_kwargs check_agent load_agent",
    "buffer": "Buffer GroupBuffer",
    "config": "RolloutConfig",
    "data": "Draw Frontier Prompt PromptKey PromptSource",
    "drops": "Drop DropReason",
    "errors": "RolloutError",
    "evaluation": "EvalResult eval_metrics",
    "events": "EventLog read_events",
    "graders": "GraderPool",
    "groups": "Group GroupRecord Member dumps_group loads_group",
    "history": "check_history",
    "ledger": "Holdings Ledger",
    "local": "EngineConfig EngineServerConfig",
    "protocols": "Grade GradeRequest",
    "router": "create_router_app run_router",
    "seeds": "derive_seed member_seed",
    "worker": "RolloutWorker",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = [
    *sorted(_HOME_OF),
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
