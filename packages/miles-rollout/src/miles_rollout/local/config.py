"""Configuration of the local engine and of its server. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

GIB = 1 << 30


class EngineConfig(BaseModel):
    """How one engine batches, stores and samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="How weights, keys and values are stored and multiplied."
    )
    max_running: int = Field(default=16, ge=1, description="Requests that are computed together at most.")
    cache_rows: int = Field(
        default=48, ge=0, description="Rows beyond `max_running` that hold prefixes, budget allowing."
    )
    max_context: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of a request, prompt and output. Default: the model's limit, at most 4096.",
    )
    kv_budget_bytes: int = Field(
        default=2 * GIB, ge=1, description="Memory for keys and values; too little is refused."
    )
    prefill_chunk: int = Field(default=512, ge=1, description="Prompt tokens of one request in one step at most.")
    token_budget: int = Field(default=2048, ge=1, description="Tokens of all requests in one step at most.")
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = Field(
        default="eager",
        description="How transformers multiplies by the experts' matrices; batch-invariant numerics need eager.",
    )
    seed: int = Field(default=0, ge=0, description="Source of seeds for requests that bring none.")
    command_timeout_s: float = Field(
        default=120.0, gt=0, description="Deadline for a control command, the longest step it may wait for included."
    )


class EngineServerConfig(BaseModel):
    """An engine behind its HTTP server, as a process of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path = Field(description="Hugging Face folder: config.json and *.safetensors.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 lets the system choose.")
    name: str = Field(default="engine", min_length=1, description="First half of the engine id.")
    epoch: int = Field(default=1, ge=0, description="Incarnation of this engine; second half of the engine id.")
    control_token: str | None = Field(default=None, description="Bearer token that control routes ask for.")
    drain_timeout_s: float = Field(default=10.0, ge=0, description="Wait for running requests after SIGTERM.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The engine itself.")
