"""The router: session affinity, health, failover, and a gate on weight versions, in front of the engines."""

from __future__ import annotations

from miles_rollout.router.app import create_router_app
from miles_rollout.router.fleet import Fleet, base_urls
from miles_rollout.router.run import run_router

__all__ = ["Fleet", "base_urls", "create_router_app", "run_router"]
