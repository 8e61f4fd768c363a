"""An engine as a process: socket first, then the model, then one line that says where it is."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

import torch
import uvicorn

from miles_rollout.listening import bind, url_of
from miles_rollout.local.config import EngineServerConfig
from miles_rollout.local.engine import LocalEngine
from miles_rollout.protocols import Numerics, WeightFormat
from miles_rollout.server.app import create_engine_app

Attach = Callable[[LocalEngine], AbstractContextManager[Mapping[str, object]]]
"""Something that lives beside the server, such as a weight receiver; what it yields is announced with the address."""

Announce = Callable[[Mapping[str, object]], None]


def print_announcement(announcement: Mapping[str, object]) -> None:
    """Write the announcement as one JSON line to standard output."""
    sys.stdout.write(json.dumps(dict(announcement)) + "\n")
    sys.stdout.flush()


def serve_engine(
    config: EngineServerConfig,
    *,
    numerics: Numerics | None = None,
    weight_format: WeightFormat | None = None,
    attach: Attach | None = None,
    announce: Announce = print_announcement,
) -> None:
    """Serve one engine until SIGTERM or SIGINT; running requests then get `drain_timeout_s` to end.

    `announce` receives `{"event": "ready", "url", "host", "port", "engine_id", …}`. Raises `PortInUseError` before the
    model is loaded, and `EngineSetupError` when it cannot be served.
    """
    torch.set_num_threads(1)
    with closing(bind(config.host, config.port)) as listener:
        engine = LocalEngine(
            config.model_dir,
            config.engine,
            name=config.name,
            epoch=config.epoch,
            numerics=numerics,
            weight_format=weight_format,
        )
        with engine, attach(engine) if attach is not None else nullcontext({}) as extras:
            announce(_announcement(config, engine, listener) | dict(extras))
            _serve(config, engine, listener)


def _announcement(config: EngineServerConfig, engine: LocalEngine, listener: socket.socket) -> dict[str, object]:
    return {
        "event": "ready",
        "url": url_of(config.host, listener),
        "host": config.host,
        "port": listener.getsockname()[1],
        "engine_id": engine.engine_id,
    }


def _serve(config: EngineServerConfig, engine: LocalEngine, listener: socket.socket) -> None:
    app = create_engine_app(engine, control_token=config.control_token)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(config.drain_timeout_s),
    )
    with _signals_end_the_server():
        uvicorn.Server(settings).run(sockets=[listener])


@contextmanager
def _signals_end_the_server() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more afterwards; what follows here must still run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _already_handled) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _already_handled(_number: int, _frame: object) -> None:
    return
