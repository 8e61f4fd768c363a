"""What the routes of one server share."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from miles_tito.config import TitoConfig
from miles_tito.errors import EngineReplyError
from miles_tito.families.base import Family
from miles_tito.protocols import MoeInfo, TokenEngine
from miles_tito.store import SessionStore
from miles_tito.tokenizer import Tokenizer
from miles_tito.versions import VersionBounds

CallIdFactory = Callable[[int], str]


def random_call_id(index: int) -> str:
    """An id for a tool call whose family prints none: `call_` and 24 hex digits."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class ServerState:
    """Everything the handlers need. `bounds` is replaced as a whole when the driver speaks."""

    config: TitoConfig
    engine: TokenEngine
    tokenizer: Tokenizer
    family: Family
    store: SessionStore
    control_token: str | None
    call_ids: CallIdFactory = random_call_id
    bounds: VersionBounds = field(default_factory=VersionBounds)
    moe: MoeInfo | None = None
    model_name: str | None = None
    max_context_tokens: int | None = None
    """The smaller of the configured limit and the engine's, once that is known."""

    async def learn_engine(self) -> None:
        """Ask the engine once what it serves. Raises `EngineReplyError` when experts are wanted of a dense model."""
        if self.model_name is not None:
            return
        info = await self.engine.describe()
        if self.config.session.record_experts and info.moe is None:
            raise EngineReplyError(
                f"session.record_experts is on, but engine {info.engine_id} ({info.model_path}) has no routed layers: "
                "switch it off",
                code="engine_not_moe",
            )
        self.moe = info.moe if self.config.session.record_experts else None
        limits = [limit for limit in (self.config.session.max_context_tokens, info.max_context) if limit is not None]
        self.max_context_tokens = min(limits, default=None)
        self.model_name = info.model_path or info.engine_id
