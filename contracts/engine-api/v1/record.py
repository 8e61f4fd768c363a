"""Record requests and replies of the real local engine on a tiny model, or check that they still look the same.

    python contracts/engine-api/v1/record.py            write exchanges.json
    python contracts/engine-api/v1/record.py --check    compare structure and digests; exit 1 on a difference

Numbers depend on the machine's arithmetic, so the check compares names, types and codes, and the digests of what was
recorded with its own tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from miles_rollout.local import EngineConfig
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.testing import tiny_qwen3_moe
from miles_rollout.records import Record, expert_digest, record_digest
from miles_rollout.server.app import create_engine_app

HERE = Path(__file__).parent
TOKEN = "control-token"
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
PREFIX = [(row % 8, (3 * row + 1) % 8) for row in range(9)]
LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789")
MACHINE_FIELDS = {"e2e_latency": 0.0, "model_path": "MODEL_DIR", "tokenizer_path": "MODEL_DIR"}


def generate_body(sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A body as our clients send it."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "skip_special_tokens": False, "no_stop_trim": True}
    return {
        "input_ids": PROMPT,
        "sampling_params": defaults | {"spaces_between_special_tokens": False} | sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "rid": "turn-0",
        **fields,
    }


def carried(pairs: Sequence[tuple[int, int]], start: int | None = None) -> dict[str, Any]:
    """Fields that carry the routes of a prefix: the same two experts of a row in both layers of the model."""
    experts = np.array([[pair, pair] for pair in pairs], dtype="<i4")
    text = base64.b64encode(experts.tobytes()).decode()
    return {"routed_experts_prefix": text, "routed_experts_start_len": len(experts) if start is None else start}


def script() -> list[tuple[str, str, str, dict[str, Any] | None]]:
    """(id, method, path, body) in the order in which they are sent."""
    seeded = {"max_new_tokens": 5, "sampling_seed": 7, "ignore_eos": True}
    experts = {"return_routed_experts": True, "routed_experts_start_len": 0}
    return [
        ("model_info", "GET", "/model_info", None),
        ("seeded", "POST", "/generate", generate_body(seeded)),
        ("greedy", "POST", "/generate", generate_body({"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True})),
        ("experts", "POST", "/generate", generate_body(seeded, **experts)),
        ("experts_from_row", "POST", "/generate", generate_body(seeded, **experts | {"routed_experts_start_len": 9})),
        ("experts_prefix", "POST", "/generate", generate_body(seeded, **experts | carried(PREFIX))),
        ("experts_prefix_repeated", "POST", "/generate", generate_body(seeded, **experts | carried(PREFIX))),
        ("stop_id", "POST", "/generate", generate_body(seeded | {"stop_token_ids": list(range(258))})),
        (
            "stop_string",
            "POST",
            "/generate",
            generate_body({"max_new_tokens": 128, "sampling_seed": 1, "stop": LETTERS}),
        ),
        ("scoring", "POST", "/generate", generate_body({"max_new_tokens": 0, "temperature": 0.0}, logprob_start_len=8)),
        ("without_logprobs", "POST", "/generate", generate_body(seeded, return_logprob=False)),
        ("keyed", "POST", "/generate", generate_body(seeded, extra_key="weight-version:0")),
        ("text_refused", "POST", "/generate", {"text": "Hello", "sampling_params": {}}),
        ("unknown_field", "POST", "/generate", generate_body(seeded, max_tokens=5)),
        ("unsupported_field", "POST", "/generate", generate_body(seeded) | {"stream": True}),
        ("invalid_sampling", "POST", "/generate", generate_body({"temperature": -1.0})),
        ("experts_prefix_short", "POST", "/generate", generate_body(seeded, **experts | carried(PREFIX, start=10))),
        ("experts_prefix_twice", "POST", "/generate", generate_body(seeded, **experts | carried([(2, 2)]))),
        ("context_too_long", "POST", "/generate", generate_body({"max_new_tokens": 4096})),
        ("unauthorized", "POST", "/flush_cache", None),
        ("pause", "POST", "/pause_generation", {"mode": "retract"}),
        ("flush", "POST", "/flush_cache", {}),
        ("version", "POST", "/update_weight_version", {"new_version": "1", "abort_all_requests": False}),
        ("version_back", "POST", "/update_weight_version", {"new_version": "0", "abort_all_requests": False}),
        ("continue", "POST", "/continue_generation", {}),
        ("after_update", "POST", "/generate", generate_body(seeded)),
        ("abort_nothing", "POST", "/abort_request", {"abort_all": True}),
        ("pickle_refused", "POST", "/update_weights_from_tensor", {"serialized_named_tensors": []}),
    ]


async def record(folder: Path) -> list[dict[str, Any]]:
    """Send the script to a fresh engine and return the exchanges; the last one meets a poisoned engine."""
    torch.set_num_threads(1)
    with LocalEngine(tiny_qwen3_moe(folder, tokenizer=True), EngineConfig(), name="engine") as engine:
        transport = httpx.ASGITransport(create_engine_app(engine, control_token=TOKEN))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
            exchanges = [await exchange(client, *call) for call in script()]
            await asyncio.to_thread(engine.port.poison, "a digest differed")
            poisoned = generate_body({"max_new_tokens": 1})
            return [*exchanges, await exchange(client, "poisoned", "POST", "/generate", poisoned)]


async def exchange(
    client: httpx.AsyncClient, name: str, method: str, path: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    headers = {} if name == "unauthorized" else {"authorization": f"Bearer {TOKEN}"}
    response = await client.request(method, path, json=body, headers=headers)
    kind = response.headers["content-type"].partition(";")[0]
    reply = response.json() if kind.endswith("json") else response.text
    return {
        "id": name,
        "method": method,
        "path": path,
        "request": body,
        "status": response.status_code,
        "content_type": kind,
        "reply": portable(reply),
    }


def portable(value: Any) -> Any:
    """The reply without what belongs to one machine and one run."""
    if isinstance(value, dict):
        return {k: MACHINE_FIELDS.get(k, portable(v)) for k, v in value.items()}
    return [portable(v) for v in value] if isinstance(value, list) else value


def structure(value: Any) -> Any:
    """Names and types; a code or a finish type is kept as it is."""
    if isinstance(value, dict):
        return {k: v if k in ("code", "type", "status") else structure(v) for k, v in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(structure(v), sort_keys=True) for v in value})
    return type(value).__name__


def inconsistencies(exchanges: list[dict[str, Any]]) -> list[str]:
    """Recorded replies whose digests are not those of their own tokens."""
    moe = next(e["reply"]["moe"] for e in exchanges if e["id"] == "model_info")
    found = []
    for e in exchanges:
        meta = e["reply"].get("meta_info", {}) if isinstance(e["reply"], dict) else {}
        if "record_digest" not in meta:
            continue
        recorded = record_of(e, moe)
        if record_digest(recorded) != meta["record_digest"]:
            found.append(f"{e['id']}: record_digest")
        if expert_digest(recorded) != meta.get("expert_digest"):
            found.append(f"{e['id']}: expert_digest")
    return found


def record_of(e: dict[str, Any], moe: dict[str, Any]) -> Record:
    """The record that a recorded exchange carries."""
    meta, experts = e["reply"]["meta_info"], None
    if "routed_experts" in meta:
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
        experts = flat.reshape(-1, len(moe["layers"]), moe["top_k"]).astype(np.int32)
    return Record(
        input_ids=e["request"]["input_ids"],
        output_ids=e["reply"]["output_ids"],
        logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32),
        version_spans=meta["weight_version_spans"],
        experts=experts,
        expert_row_start=e["request"].get("routed_experts_start_len", 0) if experts is not None else 0,
        expert_version_spans=meta.get("routed_experts_version_spans", ()),
    )


def differences(kept: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> list[str]:
    """What the engine answers now that is not shaped like what was recorded."""
    found = inconsistencies(kept) + inconsistencies(fresh)
    if [e["id"] for e in kept] != [e["id"] for e in fresh]:
        return [*found, "the script has other exchanges than exchanges.json: record again"]
    for one, other in zip(kept, fresh, strict=True):
        for key in ("method", "path", "request", "status", "content_type"):
            if one[key] != other[key]:
                found.append(f"{one['id']}: {key} was {one[key]!r} and is {other[key]!r}")
        if structure(one["reply"]) != structure(other["reply"]):
            found.append(f"{one['id']}: was {structure(one['reply'])}, is {structure(other['reply'])}")
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        fresh = asyncio.run(record(Path(folder)))
    path = HERE / "exchanges.json"
    if "--check" not in sys.argv[1:]:
        path.write_text(json.dumps({"contract": "engine-api/v1", "exchanges": fresh}, indent=1) + "\n")
        return 0
    found = differences(json.loads(path.read_text())["exchanges"], fresh)
    print("\n".join(found) if found else f"{len(fresh)} exchanges look as recorded")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
