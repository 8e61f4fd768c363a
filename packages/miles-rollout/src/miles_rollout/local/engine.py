"""`LocalEngine`: a model folder that generates, in this process.

    engine = LocalEngine(folder, EngineConfig()); engine.start()
    reply = await engine.generate(EngineRequest(input_ids=(1, 2, 3)))

Without `start`, `generate_sync` runs the same engine in the calling thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from uuid import uuid4

from miles_rollout.local.config import EngineConfig
from miles_rollout.local.core import EngineCore, EngineStats
from miles_rollout.local.errors import EngineClosedError, EngineError, EngineTimeoutError
from miles_rollout.local.loop import EngineLoop
from miles_rollout.local.model import load_model
from miles_rollout.local.requests import EngineReply, EngineRequest
from miles_rollout.local.routes import RouteLayout
from miles_rollout.local.weights import EnginePort
from miles_rollout.protocols import Numerics, WeightFormat

T = TypeVar("T")


class LocalEngine:
    """A Hugging Face folder behind continuous batching.

    Args:
        model_dir: config.json and *.safetensors, and tokenizer.json where stop strings or text are wanted.
        config: how to batch, store and sample.
        name, epoch: make the engine id `name:epoch`.
        numerics: how a forward computes; None = torch's own kernels.
        weight_format: number format of linear weights that the checkpoint holds encoded.

    Raises `EngineSetupError` when the folder cannot be served or the memory budget is too small.
    """

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        *,
        name: str = "engine",
        epoch: int = 1,
        numerics: Numerics | None = None,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self.engine_id = f"{name}:{epoch}"
        self.config = config
        self._core = EngineCore(load_model(model_dir, config, weight_format), config, self.engine_id, numerics)
        self._loop = EngineLoop(self._core, name=name, command_timeout_s=config.command_timeout_s)
        self._started = False
        self._closed = False
        self.port = EnginePort(self._core, epoch, self.call)

    def __enter__(self) -> LocalEngine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def model_dir(self) -> Path:
        return self._core.model.model_dir

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._core.version

    @property
    def moe(self) -> RouteLayout:
        """Which layers route experts; no layers for a dense model."""
        return self._core.model.capture.layout

    @property
    def max_context(self) -> int:
        return self._core.model.limits.max_context

    @property
    def paused(self) -> bool:
        return self._core.paused is not None

    def start(self) -> None:
        """Start the engine thread."""
        if not self._started:
            self._started = True
            self._loop.start()

    def close(self) -> None:
        """Fail what is in flight with `EngineClosedError` and end the engine thread. Safe to call twice."""
        self._closed = True
        if self._started:
            self._loop.close()
        else:
            self._core.close()

    def call(self, command: Callable[[], T]) -> T:
        """Run `command` between two steps: on the engine thread once started, else here."""
        if self._started:
            return self._loop.call(command)
        if self._closed:
            raise EngineClosedError(f"engine {self.engine_id} is shut down")
        return command()

    def stats(self) -> EngineStats:
        """Counters and gauges, without waiting for the engine thread."""
        return self._core.stats()

    def check_serving(self) -> None:
        """Raise `EnginePoisonedError` or `EngineClosedError` when nothing can be generated."""
        if self._closed:
            raise EngineClosedError(f"engine {self.engine_id} is shut down")
        self._core.check_serving()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Return when `request` has ended. Cancelling aborts it. During a pause requests wait.

        Raises `RequestError`, `EnginePoisonedError` or `EngineClosedError`.
        """
        if not self._started:
            raise EngineClosedError(f"engine {self.engine_id} was not started: call start() or use generate_sync()")
        ended: Future[EngineReply] = Future()
        tracked = _with_rid(request)
        self._loop.submit(lambda: self._add(tracked, ended))
        try:
            return await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            self._abandon(tracked)
            raise

    def generate_sync(self, requests: Iterable[EngineRequest]) -> list[EngineReply]:
        """Run `requests` as one batch in the calling thread and return their replies in order.

        For engines that were not started. Raises the first error.
        """
        if self._started:
            raise EngineClosedError(f"engine {self.engine_id} runs in its own thread: use generate()")
        futures: list[Future[EngineReply]] = []
        for request in requests:
            futures.append(Future())
            self._add(_with_rid(request), futures[-1])
        while self._core.has_work:
            self._core.step()
        return [future.result(timeout=0) for future in futures]

    async def abort(self, rid_prefix: str = "") -> int:
        """End requests by prefix of their id ("" = all) with what they have; return how many."""
        return await self.acall(lambda: self._core.abort(rid_prefix))

    async def acall(self, command: Callable[[], T]) -> T:
        """Run `command` between two steps without blocking the event loop. Raises `EngineTimeoutError`."""
        done = asyncio.wrap_future(self._loop.submit(command))
        try:
            async with asyncio.timeout(self.config.command_timeout_s):
                return await done
        except TimeoutError as error:
            limit_s = self.config.command_timeout_s
            raise EngineTimeoutError(f"the engine thread did not answer within {limit_s} s") from error

    def _add(self, request: EngineRequest, ended: Future[EngineReply]) -> None:
        try:
            self._core.add(request, lambda outcome: _settle(ended, outcome))
        except EngineError as error:
            _settle(ended, error)

    def _abandon(self, request: EngineRequest) -> None:
        if not self._closed:
            self._loop.submit(lambda: self._core.abandon(request))


def _with_rid(request: EngineRequest) -> EngineRequest:
    return request if request.rid else replace(request, rid=uuid4().hex)


def _settle(ended: Future[EngineReply], outcome: EngineReply | EngineError) -> None:
    if not ended.set_running_or_notify_cancel():
        return
    if isinstance(outcome, EngineError):
        ended.set_exception(outcome)
    else:
        ended.set_result(outcome)
