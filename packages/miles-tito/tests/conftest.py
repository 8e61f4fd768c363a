"""Fixtures: byte-level families, a server over a stub engine, golden files."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from miles_tito import Family, SessionConfig, SessionStore, TitoConfig, Tokenizer, load_family
from miles_tito.server import create_app
from miles_tito.testing import StubEngine, StubReply

ROOT = Path(__file__).resolve().parents[3]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def golden() -> Path:
    return ROOT.parent / "shared" / "golden" / "tito"


@pytest.fixture(scope="session")
def contract() -> Path:
    return ROOT / "contracts" / "trajectory" / "v1"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level(special=SPECIAL, added=MARKERS)


@pytest.fixture(scope="session")
def qwen3(tokenizer: Tokenizer) -> Family:
    return load_family("qwen3", tokenizer)


@pytest.fixture(scope="session")
def smollm2(tokenizer: Tokenizer) -> Family:
    return load_family("smollm2", tokenizer)


class Server:
    """A session server in this process, its stub engine, and a client of it."""

    def __init__(
        self,
        family: Family,
        engine: StubEngine,
        session: SessionConfig,
        control_token: str | None,
        clock: Callable[[], float],
    ) -> None:
        self.family = family
        self.engine = engine
        self.app = create_app(
            TitoConfig(session=session),
            engine=engine,
            tokenizer=family.tokenizer,
            family=family,
            control_token=control_token,
            store=SessionStore(family, session, clock=clock),
            call_ids=lambda index: f"call_{index}",
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server", timeout=30.0)

    def says(self, *texts: str, **options: object) -> None:
        """Script the engine: each text is sampled as it stands, stop token included."""
        for text in texts:
            ids = self.family.tokenizer.encode(text)
            matched = ids[-1] if ids and self.family.is_closed(ids[-1]) else None
            self.engine.script.append(StubReply(ids, matched=matched, **options))  # type: ignore[arg-type]

    async def open(self, **body: object) -> str:
        answer = await self.http.post("/sessions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session_id"])

    async def chat(self, session_id: str, messages: object, **body: object) -> httpx.Response:
        url = f"/sessions/{session_id}/v1/chat/completions"
        return await self.http.post(url, json={"messages": messages, **body})

    async def view(self, session_id: str) -> dict[str, object]:
        answer = await self.http.get(f"/sessions/{session_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def prompt(self) -> str:
        """Text of the prompt that the engine got last."""
        return self.family.tokenizer.decode(self.engine.requests[-1].input_ids)


MakeServer = Callable[..., Server]


@pytest.fixture
async def make_server(smollm2: Family, qwen3: Family) -> AsyncIterator[MakeServer]:
    async with AsyncExitStack() as stack:

        def make(
            family: Family | None = None,
            *,
            engine: StubEngine | None = None,
            control_token: str | None = None,
            clock: Callable[[], float] = time.monotonic,
            **session: object,
        ) -> Server:
            used = family or smollm2
            stub = engine or StubEngine(stop_id=used.stop_ids[0])
            config = SessionConfig.model_validate(session)
            server = Server(used, stub, config, control_token, clock)
            stack.push_async_callback(server.http.aclose)
            return server

        yield make
