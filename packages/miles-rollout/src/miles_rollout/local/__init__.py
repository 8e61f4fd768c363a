"""The local engine: continuous batching of ours over unmodified transformers modules.

Importing this package loads neither torch nor transformers; `miles_rollout.local.engine` does.
"""

from miles_rollout.local.config import EngineConfig, EngineServerConfig
from miles_rollout.local.errors import (
    EngineBusyError,
    EngineClosedError,
    EngineError,
    EnginePoisonedError,
    EngineSetupError,
    EngineTimeoutError,
    RequestError,
    WeightStateError,
    WeightTensorError,
)
from miles_rollout.local.requests import EngineReply, EngineRequest, FinishReason, SamplingParams

__all__ = [
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EnginePoisonedError",
    "EngineReply",
    "EngineRequest",
    "EngineServerConfig",
    "EngineSetupError",
    "EngineTimeoutError",
    "FinishReason",
    "RequestError",
    "SamplingParams",
    "WeightStateError",
    "WeightTensorError",
]
