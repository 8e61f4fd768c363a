"""Configuration of miles-tito: one frozen root, one section for each component."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(_Section):
    """Where the session server listens and what it accepts."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one and announces it.")
    max_body_bytes: int = Field(
        default=64 << 20, ge=1024, description="Largest request body; a larger one is answered 413."
    )
    drain_timeout_s: float = Field(default=30.0, gt=0, description="How long running requests may take after SIGTERM.")


class SessionConfig(_Section):
    """Rules of the sessions."""

    matcher: Literal["strict", "loose_tool_call", "role_content_only"] = Field(
        default="strict", description="When a replayed message is taken for the stored one."
    )
    on_truncation: Literal["refuse", "close"] = Field(
        default="refuse",
        description="A request that extends a truncated turn: answer 409, or close the turn with loss 0.",
    )
    idle_ttl_s: float = Field(
        default=3600.0, ge=0, description="Idle time after which a session is dropped; 0 keeps it."
    )
    max_sessions: int = Field(default=4096, ge=1, description="Sessions held at once; one more is answered 429.")
    max_context_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt plus answer, at most the engine's own; a longer prompt is answered 400.",
    )
    default_max_new_tokens: int = Field(
        default=1024, ge=1, description="Answer length when neither session nor request sets one."
    )
    record_experts: bool = Field(
        default=False, description="Ask the engine for the routed experts of every token and keep them."
    )
    compare_at_collect: bool = Field(
        default=True, description="Compare the stored ids with a fresh rendering when trajectories are collected."
    )


class FamilyConfig(_Section):
    """The chat family."""

    name: str = Field(default="qwen3", description="Chat family; `miles-tito families` lists them.")
    default_system: str | None = Field(default=None, description="System turn of conversations that bring none.")
    append_roles: tuple[str, ...] | None = Field(
        default=None, description="Roles that may follow a generated turn; can only narrow what the family allows."
    )


class EngineConfig(_Section):
    """How the engine is called."""

    url: str | None = Field(default=None, description="Base URL of an engine or router with the engine API.")
    timeout_s: float = Field(default=600.0, gt=0, description="Deadline of one generation, retries included.")
    max_retries: int = Field(
        default=6, ge=0, description="Repetitions after connection failures and statuses 429, 502, 503, 504."
    )
    backoff_s: float = Field(default=0.2, ge=0, description="First pause before a repetition; doubled each time.")
    backoff_cap_s: float = Field(default=5.0, ge=0, description="Longest pause before a repetition.")


class TitoConfig(_Section):
    """Root configuration of miles-tito."""

    server: ServerConfig = Field(default=ServerConfig(), description="HTTP server.")
    session: SessionConfig = Field(default=SessionConfig(), description="Session rules.")
    family: FamilyConfig = Field(default=FamilyConfig(), description="Chat family.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Engine client.")
    tokenizer: Path | None = Field(default=None, description="Folder that holds tokenizer.json.")
