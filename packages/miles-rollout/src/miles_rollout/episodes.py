"""One trajectory's life: create a session, let the agent act, collect, delete, grade."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_rollout.agents import agent_metadata, chat_request_kwargs
from miles_rollout.config import WorkerConfig
from miles_rollout.data.prompts import Prompt
from miles_rollout.errors import SessionCallError
from miles_rollout.groups import Member
from miles_rollout.protocols import (
    Agent,
    Grade,
    Grader,
    GradeRequest,
    SessionClient,
    SessionHandle,
    Trajectory,
    TrajectoryStatus,
)

logger = logging.getLogger(__name__)

FatalErrors = tuple[type[BaseException], ...]
_SEVERITY: tuple[TrajectoryStatus, ...] = ("completed", "truncated", "failed", "aborted")


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished member. `failure` is the error that made it aborted, where one did."""

    member: Member
    failure: BaseException | None = None


class EpisodeRunner:
    """Runs episodes on the session path; training and evaluation share it.

    An agent's error is recorded in the member's metadata as `agent_error`, and what its session recorded is still
    collected. A session call that fails or is late costs this member only. Errors of the `fatal` types always leave.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        sessions: SessionClient,
        agent: Agent,
        grader: Grader | None,
        fatal: FatalErrors = (),
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._agent = agent
        self._grader = grader
        self._fatal = fatal
        self._deletions: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    async def run(
        self, prompt: Prompt, *, seed: int, sampling: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> Episode:
        """Run one episode to its end. Raises only errors of the fatal types, and on cancellation."""
        try:
            handle = await self._create(seed, sampling, metadata)
        except SessionCallError as error:
            return _aborted(seed, str(error), error)
        try:
            returned, agent_failure = await self._act(handle, prompt, sampling)
            trajectories = await self._collect(handle)
        except SessionCallError as error:
            return _aborted(seed, str(error), error)
        finally:
            self._delete(handle)
        refusal = self._refusal(trajectories)
        if refusal is not None:
            return _aborted(seed, refusal, agent_failure, trajectories, returned)
        return await self._reward(prompt, seed, trajectories, returned)

    async def close(self) -> None:
        """Wait for deletions under way; each has its own deadline."""
        if self._deletions:
            await asyncio.wait(self._deletions)

    async def _create(self, seed: int, sampling: Mapping[str, Any], metadata: Mapping[str, Any]) -> SessionHandle:
        limit_s = self._config.create_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._sessions.create(seed=seed, sampling=sampling, metadata=metadata)
        except self._fatal:
            raise
        except TimeoutError as error:
            raise SessionCallError(f"no session was created within {limit_s} s") from error
        except Exception as error:
            raise SessionCallError(f"no session was created: {_named(error)}") from error

    async def _act(
        self, handle: SessionHandle, prompt: Prompt, sampling: Mapping[str, Any]
    ) -> tuple[dict[str, Any], BaseException | None]:
        messages = copy.deepcopy(list(prompt.messages))
        metadata = copy.deepcopy(agent_metadata(prompt, handle, self._config.max_seq_len))
        try:
            returned = await self._agent(handle.base_url, messages, chat_request_kwargs(sampling), metadata)
            return _plain(returned), None
        except self._fatal:
            raise
        except Exception as error:
            self.counts["agent_errors"] += 1
            logger.warning("the agent failed on prompt %r: %s", prompt.prompt_id, _named(error), exc_info=error)
            return {"agent_error": _named(error)}, error

    async def _collect(self, handle: SessionHandle) -> tuple[Trajectory, ...]:
        limit_s = self._config.collect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return tuple(await self._sessions.collect(handle.session_id))
        except self._fatal:
            raise
        except TimeoutError as error:
            raise SessionCallError(f"session {handle.session_id} was not collected within {limit_s} s") from error
        except Exception as error:
            raise SessionCallError(f"session {handle.session_id} was not collected: {_named(error)}") from error

    def _delete(self, handle: SessionHandle) -> None:
        """Delete in the background, so that neither cancellation nor a slow server holds up the member."""
        task = asyncio.create_task(self._delete_now(handle.session_id))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _delete_now(self, session_id: str) -> None:
        try:
            async with asyncio.timeout(self._config.delete_timeout_s):
                await self._sessions.delete(session_id)
        except Exception as error:  # noqa: BLE001 - a session that stays costs memory on its server, not the run
            self.counts["delete_errors"] += 1
            logger.warning("session %s was not deleted: %s", session_id, _named(error))

    def _refusal(self, trajectories: Sequence[Trajectory]) -> str | None:
        if not trajectories:
            return "the session recorded no turn"
        if self._config.require_versions and any(part.oldest_version is None for part in trajectories):
            return "a trajectory has no weight versions"
        return "aborted" if any(part.status == "aborted" for part in trajectories) else None

    async def _reward(
        self, prompt: Prompt, seed: int, trajectories: tuple[Trajectory, ...], returned: dict[str, Any]
    ) -> Episode:
        try:
            grade = await self._grade(prompt, trajectories, returned)
        except self._fatal:
            raise
        except Exception as error:  # noqa: BLE001 - a grader is user code; without a reward the member is aborted
            return _aborted(seed, f"no reward: {_named(error)}", error, trajectories, returned)
        rewarded = tuple(part if part.reward is not None else part.with_reward(grade.reward) for part in trajectories)
        status = max((part.status for part in trajectories), key=_SEVERITY.index)
        return Episode(Member(rewarded, status, grade.reward, grade.reason, seed, returned))

    async def _grade(self, prompt: Prompt, trajectories: Sequence[Trajectory], returned: Mapping[str, Any]) -> Grade:
        """The agent's own reward, else the one the trajectory has, else the grader's."""
        own = returned.get("reward")
        if isinstance(own, int | float):
            return Grade(float(own), "agent")
        last = trajectories[-1]
        if last.reward is not None:
            return Grade(last.reward, "trajectory")
        if self._grader is None:
            raise SessionCallError("neither the agent nor a grader gave one")
        metadata = {**prompt.metadata, **returned}
        return await self._grader.grade(
            GradeRequest(prompt.prompt_id, prompt.label, last.messages, metadata, last.status)
        )


def _aborted(
    seed: int,
    reason: str,
    failure: BaseException | None = None,
    trajectories: tuple[Trajectory, ...] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Episode:
    return Episode(Member(trajectories, "aborted", None, reason, seed, metadata or {}), failure)


def _plain(returned: Any) -> dict[str, Any]:
    """What an agent returned, if it is an object of JSON. Raises TypeError or ValueError."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TypeError(f"an agent returns a dict or None, not {type(returned).__name__}")
    plain: dict[str, Any] = json.loads(json.dumps(dict(returned), allow_nan=False))
    return plain


def _named(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
