"""A training run from its configuration to its report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from miles.config import ModelConfig, RunConfig
from miles.environment import write_environment
from miles.errors import ConfigError
from miles.faults import trajectory_codec
from miles.fleet import Fleet, start_fleet
from miles.layers import Resolved, to_toml
from miles.loop import Driver, PublishedVersion
from miles.phases import Phases
from miles.report import write_report
from miles.run_folder import MetricsLog, RunFolder
from miles.runtime.local import LocalRuntime
from miles.stopping import StopRequest
from miles.tasks import RolloutTask
from miles.tasks.registry import load_task
from miles.ui import PlainLines, View
from miles.wiring.errors import stopping_code, typed
from miles.wiring.rollout import build_worker, load_source
from miles.wiring.sessions import TitoSessions
from miles_rollout import EventLog, GraderPool, PromptSource

ROLE_CHECK_S = 0.5


async def run_training(
    resolved: Resolved, root: Path, view: View | None = None, stop: StopRequest | None = None
) -> str:
    """Run to the end, or to the step in which `stop` is requested, and write the report; returns what to tell the user.

    A violated identity or a failed role is raised after the roles have ended and the report, which names it, was
    written.
    """
    view, stop = view or PlainLines(), stop or StopRequest()
    check_model(resolved.config)
    folder = RunFolder(root)
    task = load_task(resolved.config.task, resolved.config.loop.seed)
    source = load_source(resolved.config, task)
    folder.create()
    folder.config.write_text(to_toml(resolved))
    write_environment(folder.environment)
    events = EventLog(folder.events)
    metrics = MetricsLog(folder.metrics)
    try:
        async with view:
            await _run(resolved.config, folder, view, stop, events, metrics, task, source)
    except Exception as error:
        stopped = typed(error)
        with suppress(OSError):  # where nothing can be written any more, the error itself is the message
            events.append("failure", code=stopping_code(stopped), message=str(stopped))
            write_report(folder)
        raise stopped from error
    finally:
        metrics.close()
        events.close()
        await task.close()
    ended = "stopped as asked, " if stop.requested else ""
    return f"{ended}report: {write_report(folder)}"


async def _run(
    config: RunConfig,
    folder: RunFolder,
    view: View,
    stop: StopRequest,
    events: EventLog,
    metrics: MetricsLog,
    task: RolloutTask,
    source: PromptSource,
) -> None:
    model = await model_folder(config, view)
    runtime = LocalRuntime(folder.root, start_timeout_s=config.runtime.start_timeout_s)
    async with aclosing(runtime), GraderPool(config.rollout.graders, task.grader) as graders:
        view.phase("starting trainer, engine, router and session server")
        fleet = await start_fleet(config, runtime, model)
        version = PublishedVersion()
        async with aclosing(fleet):
            worker, ledger = build_worker(config, task, source, TitoSessions(fleet.sessions), graders, events, version)
            phases = Phases(events)
            driver = Driver(
                config=config,
                folder=folder,
                fleet=fleet,
                task=task,
                worker=worker,
                graders=graders,
                ledger=ledger,
                events=events,
                codec=trajectory_codec(config.faults),
                metrics=metrics,
                version=version,
                view=view,
                phases=phases,
                stop=stop,
            )
            view.watch(driver.snapshot)
            await run_watched(driver.run(), fleet)
        view.phase("done")


async def run_watched(work: Coroutine[Any, Any, None], fleet: Fleet) -> None:
    """Run `work` while looking after the roles: one that ends stops the run at once, with the end of its log."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=ROLE_CHECK_S)
            if not task.done():
                fleet.check_alive()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check_model(config: RunConfig) -> None:
    """Raise `ConfigError` when `model.path` is no Hugging Face folder."""
    if config.model.path is not None and not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path {config.model.path} is no Hugging Face folder: it has no config.json")


async def model_folder(config: RunConfig, view: View) -> Path:
    """The Hugging Face folder to start from; a model that is not in the cache is made or fetched now."""
    if config.model.path is not None:
        return config.model.path
    cache = config.runtime.cache or default_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot use {cache} as cache for models: {error.strerror}; set --runtime.cache") from None
    if config.model.name == "toy":
        return await asyncio.to_thread(_toy_model, config.model, cache, view)
    from miles.models.smollm2 import smollm2_folder

    return await asyncio.to_thread(smollm2_folder, cache, view.phase)


def _toy_model(model: ModelConfig, cache: Path, view: View) -> Path:
    """In a thread of its own from the import on: torch takes seconds to load, and the view should move meanwhile."""
    from miles.toy import ToyRecipe, toy_folder

    recipe = ToyRecipe(seed=model.toy_seed, steps=model.toy_pretrain_steps)
    view.phase(f"toy model: {cache / recipe.folder_name} (pre-trained here when it is absent)")
    return toy_folder(recipe, cache)


def default_cache() -> Path:
    """The user's cache folder for models made here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "miles"
