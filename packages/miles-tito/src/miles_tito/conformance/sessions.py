"""Scripted sessions, played over HTTP against the server with a stub engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from miles_tito.codec import loads_batch
from miles_tito.config import SessionConfig, TitoConfig
from miles_tito.families import Family
from miles_tito.server import create_app
from miles_tito.testing import StubEngine, StubReply
from miles_tito.tokenizer import Tokenizer
from miles_tito.trajectory import Trajectory, runs

from .found import Case, NotBuiltError, Tokenizers, WrongError, expect_equal, real_family

_BASE = "http://session-server"


def check_session(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """Every step's status, engine call and prompt, then the final view and the collected samples."""
    if case["mode"] != "linear":
        raise NotBuiltError(f"{case['mode']} sessions")
    asyncio.run(_Player(case, real_family(case["family"], tokenizers)).play())


class _Player:
    def __init__(self, case: Case, family: Family) -> None:
        self.case = case
        self.family = family
        self.tokenizer: Tokenizer = family.tokenizer
        self.engine = StubEngine()
        self.replies = 0
        app = create_app(
            TitoConfig(session=SessionConfig(matcher=case["matcher"])),
            engine=self.engine,
            tokenizer=self.tokenizer,
            family=family,
            call_ids=lambda index: f"call_{index}",
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=_BASE)

    async def play(self) -> None:
        async with self.client:
            session_id = (await self.client.post("/sessions")).json()["session_id"]
            for number, step in enumerate(self.case["steps"]):
                await self._step(number, step, f"/sessions/{session_id}")
            await self._final(f"/sessions/{session_id}")

    async def _step(self, number: int, step: Case, url: str) -> None:
        self.engine.script = [self._scripted(step["engine"])] if step.get("engine") else []
        before = len(self.engine.requests)
        answer = await self.client.post(f"{url}/v1/chat/completions", json=step["request"])
        expected, where = step["expect"], f"steps[{number}]"
        expect_equal(f"{where} status ({answer.text[:200]})", answer.status_code, expected["status"])
        called = len(self.engine.requests) > before
        expect_equal(f"{where} engine_called", called, expected["engine_called"])
        prompt = self.tokenizer.decode(self.engine.requests[-1].input_ids) if called else None
        expect_equal(f"{where} prompt_text", prompt, expected["prompt_text"])
        message = step["engine"].get("message") if step.get("engine") else None
        if answer.status_code == 200 and message:
            _expect_message(where, answer.json()["choices"][0]["message"], message)

    def _scripted(self, engine: Case) -> StubReply:
        if "status" in engine:
            return StubReply(status=engine["status"])
        self.replies += 1
        ids = self.tokenizer.encode(engine["sampled_text"])
        cut = engine["finish_reason"] == "length"
        matched = None if cut else ids[-1]
        return StubReply(ids, "length" if cut else "stop", matched, versions=[self.replies] * len(ids))

    async def _final(self, url: str) -> None:
        final = self.case["final"]
        view = (await self.client.get(url)).json()
        expect_equal("records_in_view", len(view["turns"]), final["records_in_view"])
        metadata = view["metadata"]
        text = self.tokenizer.decode(metadata["accumulated_token_ids"])
        expect_equal("accumulated_text", text, final["accumulated_text"])
        kinds = [mismatch["type"] for mismatch in metadata["tito_session_mismatch"]]
        expect_equal("mismatch_types", kinds, final["mismatch_types"])
        answer = await self.client.post(f"{url}/samples", json={})
        expect_equal("samples_status", answer.status_code, final["samples_status"])
        trajectories = loads_batch(answer.content).trajectories
        expect_equal("samples", [self._sample(trajectory) for trajectory in trajectories], final["samples"])

    def _sample(self, trajectory: Trajectory) -> dict[str, Any]:
        ids = trajectory.token_ids.tolist()
        return {
            "text": self.tokenizer.decode(ids),
            "trained_text": [self.tokenizer.decode(ids[start:end]) for start, end in runs(trajectory.loss_mask)],
            "response_length": trajectory.n_tokens - trajectory.turns[0].prompt_length,
            "status": trajectory.status,
            "weight_versions": [str(turn.version_end) for turn in trajectory.turns],
        }


def _expect_message(where: str, found: Case, expected: Case) -> None:
    for key, value in expected.items():
        if found.get(key) != value:
            raise WrongError(f"{where}: message.{key} is {found.get(key)!r}, expected {value!r}")
