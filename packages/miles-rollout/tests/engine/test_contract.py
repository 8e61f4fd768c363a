"""contracts/engine-api/v1: the recorded exchanges fit their schemas, and the engine still answers like that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from miles_rollout.engines import FakeEngine

CONTRACT = Path(__file__).parents[4] / "contracts" / "engine-api" / "v1"
EXCHANGES: list[dict[str, Any]] = json.loads((CONTRACT / "exchanges.json").read_text())["exchanges"]
GENERATED = [e for e in EXCHANGES if e["path"] == "/generate" and e["status"] == 200]
REFUSED = [e for e in EXCHANGES if e["status"] != 200]


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONTRACT / f"{name}.schema.json").read_text())
    return found


@pytest.mark.parametrize("exchange", GENERATED, ids=lambda e: str(e["id"]))
def test_recorded_requests_and_replies_fit_the_schemas(exchange: dict[str, Any]) -> None:
    jsonschema.validate(exchange["request"], schema("request"))
    jsonschema.validate(exchange["reply"], schema("reply"))


@pytest.mark.parametrize("exchange", REFUSED, ids=lambda e: str(e["id"]))
def test_recorded_errors_are_problems(exchange: dict[str, Any]) -> None:
    assert exchange["content_type"] == "application/problem+json"
    jsonschema.validate(exchange["reply"], schema("problem"))


def test_the_engine_still_answers_as_recorded() -> None:
    command = [sys.executable, str(CONTRACT / "record.py"), "--check"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_fake_engine_fits_the_schemas() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(FakeEngine().app), base_url="http://fake") as client:
        for exchange in GENERATED:
            response = await client.post("/generate", json=exchange["request"])
            assert response.status_code == 200, response.text
            jsonschema.validate(response.json(), schema("reply"))
