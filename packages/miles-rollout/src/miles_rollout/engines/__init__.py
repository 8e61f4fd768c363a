"""Clients of engines, and an engine without a model for tests."""

from miles_rollout.engines.control import EngineControl, EngineControlError, ModelInfo
from miles_rollout.engines.fake import FakeEngine, Fault

__all__ = ["EngineControl", "EngineControlError", "FakeEngine", "Fault", "ModelInfo"]
