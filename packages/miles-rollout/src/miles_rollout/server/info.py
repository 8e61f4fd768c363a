"""Health, model, server and metrics routes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from miles_rollout.local.core import EngineStats
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.requests import EngineRequest, SamplingParams
from miles_rollout.server.problems import problem

HEALTH_TIMEOUT_S = 20.0


async def health(request: Request) -> Response:
    """200 while the engine serves; 503 once it is poisoned or closed."""
    _engine(request).check_serving()
    return PlainTextResponse("")


async def health_generate(request: Request) -> Response:
    """Generate one token; during a pause only ask the engine thread for a sign of life."""
    engine = _engine(request)
    engine.check_serving()
    probe = EngineRequest((0,), SamplingParams(temperature=0.0, max_new_tokens=1), extra_key="health")
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await (engine.acall(lambda: None) if engine.paused else engine.generate(probe))
    except TimeoutError:
        return problem(503, "health_timeout", f"no token within {HEALTH_TIMEOUT_S} s")
    return PlainTextResponse("")


async def model_info(request: Request) -> Response:
    engine = _engine(request)
    info: dict[str, Any] = {
        "model_path": str(engine.model_dir),
        "tokenizer_path": str(engine.model_dir),
        "is_generation": True,
        "weight_version": str(engine.version),
        "engine_id": engine.engine_id,
        "max_context": engine.max_context,
    }
    if engine.moe.layers:
        info["moe"] = {
            "layers": list(engine.moe.layers),
            "num_experts": engine.moe.num_experts,
            "top_k": engine.moe.top_k,
            "replays_routes": True,
        }
    return JSONResponse(info)


async def server_info(request: Request) -> Response:
    """The engine's configuration and its state at this moment."""
    engine = _engine(request)
    stats = engine.stats()
    return JSONResponse(
        {
            "model_path": str(engine.model_dir),
            "engine_id": engine.engine_id,
            "engine": engine.config.model_dump(mode="json"),
            "max_context": engine.max_context,
            "tp_size": 1,
            "weight_version": str(stats.version),
            "num_running_reqs": stats.running,
            "num_queue_reqs": stats.waiting,
            "paused": stats.paused,
            "poisoned": stats.poisoned,
        }
    )


class MetricsPage:
    """Prometheus text under SGLang's names. Throughput is measured between two scrapes."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), 0)

    async def __call__(self, request: Request) -> Response:
        stats = _engine(request).stats()
        gauges = {
            "num_running_reqs": stats.running,
            "num_queue_reqs": stats.waiting,
            "gen_throughput": self._throughput(stats),
            "token_usage": stats.kv_used_tokens / stats.kv_capacity_tokens,
            "cache_hit_rate": stats.cached_tokens / max(stats.prompt_tokens, 1),
            "num_paused": int(stats.paused),
            "weight_version": stats.version,
        }
        counters = {
            "prompt_tokens_total": stats.prompt_tokens,
            "cached_tokens_total": stats.cached_tokens,
            "generation_tokens_total": stats.generated_tokens,
            "steps_total": stats.steps,
            "failed_steps_total": stats.failed_steps,
        }
        lines = [line for name, value in gauges.items() for line in _metric(name, "gauge", value)]
        lines += [line for name, value in counters.items() for line in _metric(name, "counter", value)]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    def _throughput(self, stats: EngineStats) -> float:
        now, (then, tokens) = time.monotonic(), self._last
        self._last = (now, stats.generated_tokens)
        return (stats.generated_tokens - tokens) / max(now - then, 1e-9)


def _metric(name: str, kind: str, value: float) -> tuple[str, str]:
    return f"# TYPE sglang:{name} {kind}", f"sglang:{name} {value:g}"


def _engine(request: Request) -> LocalEngine:
    engine: LocalEngine = request.app.state.engine
    return engine
