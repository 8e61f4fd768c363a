"""The rollout side of a run: prompts, sessions, agent, graders, buffer and ledger, joined in one worker."""

from __future__ import annotations

from collections.abc import Callable

from miles.config import RunConfig
from miles.tasks import RolloutTask
from miles_rollout import EventLog, GraderPool, Ledger, PromptSource, RolloutWorker
from miles_rollout.protocols import SessionClient
from miles_tito import IdentityViolation


def load_source(config: RunConfig, task: RolloutTask) -> PromptSource:
    """The task's training prompts, or those of `task.prompts_path`; a bad line is an error with its number."""
    data = config.rollout.data.model_copy(update={"seed": config.loop.seed})
    if config.task.prompts_path is not None:
        return PromptSource.from_file(config.task.prompts_path, data)
    return PromptSource(task.training, data)


def build_worker(
    config: RunConfig,
    task: RolloutTask,
    source: PromptSource,
    sessions: SessionClient,
    graders: GraderPool,
    events: EventLog,
    version: Callable[[], int],
) -> tuple[RolloutWorker, Ledger]:
    """A worker that is not started, and the ledger it keeps. A violated identity ends it at once."""
    ledger = Ledger(events, max_staleness=config.rollout.buffer.max_staleness)
    worker = RolloutWorker(
        config.rollout.worker,
        config.rollout.buffer,
        source=source,
        ledger=ledger,
        sessions=sessions,
        agent=task.agent,
        grader=graders,
        run_seed=config.loop.seed,
        version=version,
        fatal_errors=(IdentityViolation,),
    )
    return worker, ledger
