"""Prompts: where they come from and which of them are still owed an outcome."""

from __future__ import annotations

from miles_rollout.data.prompts import Draw, Prompt, PromptKey
from miles_rollout.data.source import Frontier, PromptSource, epoch_order

__all__ = ["Draw", "Frontier", "Prompt", "PromptKey", "PromptSource", "epoch_order"]
