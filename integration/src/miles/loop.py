"""The driver's loop: batch, train, update, and the checks that close each step.

Rollout runs beside it all the time (the worker's tasks share this event loop; engines and trainer are other
processes), bounded by the buffer and by staleness. `--sync` is this same loop with limit 0 and admission control.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles.config import RunConfig
from miles.fleet import Fleet
from miles.phases import Phases, members_of, role_of
from miles.run_folder import MetricsLog, RunFolder
from miles.stopping import StopRequest
from miles.tasks import RolloutTask
from miles.ui import Snapshot, View
from miles_rollout import (
    EvalResult,
    EventLog,
    GraderPool,
    Group,
    Ledger,
    Prompt,
    PromptKey,
    RolloutWorker,
    dumps_group,
)
from miles_rollout.groups import Member
from miles_rollout.protocols import TrajectoryCodec

SUCCESS = 1.0
HELD_OUT_SEED = 20_000


class PublishedVersion:
    """The version all engines serve. The driver alone raises it; the worker reads it."""

    def __init__(self) -> None:
        self._current = 0

    def __call__(self) -> int:
        return self._current

    def advance(self, version: int) -> None:
        """Take `version`, which must be the next one."""
        if version != self._current + 1:
            raise ValueError(f"version {version} does not follow {self._current}")
        self._current = version


@dataclass(frozen=True, slots=True)
class Driver:
    """One run over a started fleet and a worker that is not started."""

    config: RunConfig
    folder: RunFolder
    fleet: Fleet
    task: RolloutTask
    worker: RolloutWorker
    graders: GraderPool
    ledger: Ledger
    codec: TrajectoryCodec
    events: EventLog
    metrics: MetricsLog
    version: PublishedVersion
    view: View
    phases: Phases
    stop: StopRequest

    async def run(self) -> None:
        """All steps, or those until a stop is requested. Raises the first violated identity, or the error that ended a
        role or the worker.
        """
        began = time.monotonic()
        await self._verify_boot_weights()
        await self._held_out(step=0)
        steps = 0
        async with self.worker:
            while steps < self.config.loop.steps and not self.stop.requested:
                row = await self._step(steps)
                steps += 1
                row["time/elapsed_s"] = time.monotonic() - began
                self.metrics.write(row)
                self.view.row(row)
        if self.stop.requested:
            self.events.append("stopped", step=steps)
        await self._held_out(step=steps)
        await self._save()
        self.phases.enter("end")

    def snapshot(self) -> Snapshot:
        """What the view may show now. Nothing that metrics count is consumed."""
        held, counts = self.worker.holdings(), self.ledger.counts()
        phase = self.phases.current
        return Snapshot(
            steps=self.config.loop.steps,
            doing=phase.name,
            since_s=phase.began_s,
            in_flight=len(held.in_flight),
            queued=len(held.buffered),
            batch_groups=self.config.rollout.worker.batch_groups,
            trained=counts["trained"],
            dropped={name.removeprefix("drop/"): n for name, n in counts.items() if name.startswith("drop/")},
            versions={role_of(engine): self.version() for engine in self.fleet.engine_ids},
            next_version=self.version() + 1 if phase.name == "update" else None,
            stopping=self.stop.requested,
        )

    async def _verify_boot_weights(self) -> None:
        """Version 0 is what the engines loaded: it must be what the trainer loaded."""
        self.view.phase("comparing the engines' weights with the trainer's, tensor by tensor")
        await self._announce_versions(begun=0)
        with self.phases.doing("verify", self._processes()):
            report = await self.fleet.trainer_call(
                "verify", {"version": 0}, timeout_s=self.config.runtime.update_timeout_s
            )
        self.ledger.record_update(0, report["manifest_digest"])
        self.metrics.write({"step": 0, "identity/tensors_verified": report["tensors_verified"]})

    async def _step(self, step: int) -> dict[str, Any]:
        waiting = time.monotonic()
        with self.phases.doing("wait"):
            groups = await self.worker.next_batch()
        self.phases.record_generation(members_of(groups))
        began = time.monotonic()
        trained_metrics = await self._train(groups, step)
        updating = time.monotonic()
        update = await self._update()
        done = time.monotonic()
        self.worker.close_step(step)
        return {
            "step": step + 1,
            **self._reward_metrics(groups),
            **self._staleness_metrics(groups, step),
            **trained_metrics,
            **self.worker.get_metrics(),
            **self.graders.get_metrics(),
            **update,
            "identity/ledger_closed": 1,
            "groups/dropped": sum(n for name, n in self.ledger.counts().items() if name.startswith("drop/")),
            "rollout/tokens_per_s": sum(group.n_tokens for group in groups) / max(done - waiting, 1e-9),
            "time/wait_batch_s": began - waiting,
            "time/train_s": updating - began,
            "time/update_s": done - updating,
        }

    async def _train(self, groups: Sequence[Group], step: int) -> dict[str, Any]:
        if self.config.task.shuffle_rewards:
            groups = shuffled_rewards(groups, seed=self.config.loop.seed * 1_000_003 + step)
        data = [dumps_group(group, self.codec) for group in groups]
        if step in (0, self.config.loop.steps - 1) or self.stop.requested:
            for group, body in zip(groups, data, strict=True):
                (self.folder.trajectories / f"step-{step + 1:06d}-group-{group.group_id:06d}.bin").write_bytes(body)
        with self.phases.doing("train", self._trainers()):
            answer = await self.fleet.trainer_call(
                "train", {"step": step}, data, timeout_s=self.config.runtime.train_timeout_s
            )
        acknowledged = {PromptKey(*key) for key in answer["trained"]}
        trained = [group for group in groups if group.key in acknowledged]
        self.worker.record_trained(trained, step, version=self.version())
        return dict(answer["metrics"])

    async def _update(self) -> dict[str, Any]:
        """Publish the next version and let the rollout side know."""
        version = self.version() + 1
        await self._announce_versions(begun=version)
        with self.phases.doing("update", self._processes()):
            report = await self.fleet.trainer_call(
                "publish", {"version": version}, timeout_s=self.config.runtime.update_timeout_s
            )
        self.ledger.record_update(version, report["manifest_digest"])
        self.version.advance(version)
        await self._announce_versions(begun=version)
        self.worker.notify_version()
        return {
            "weights/version": version,
            "identity/tensors_verified": report["tensors_verified"],
            "weights/wire_bytes": report["wire_bytes"],
            **{f"weights/{phase}_s": seconds for phase, seconds in report["seconds"].items()},
        }

    async def _announce_versions(self, begun: int) -> None:
        acknowledged = dict.fromkeys(self.fleet.engine_ids, self.version())
        await self.fleet.sessions.set_versions(begun=begun, acknowledged=acknowledged)

    async def _held_out(self, step: int) -> None:
        """Ask every held-out set; `heldout/success` is that of the first. Given up when a stop is requested."""
        if not self.config.loop.evaluate or self.stop.requested:
            return
        count = sum(len(questions) for questions in self.task.held_out.values())
        self.view.phase(f"asking {count} held-out questions at version {self.version()}")
        row: dict[str, float] = {}
        for name, questions in self.task.held_out.items():
            with self.phases.doing("evaluate"):
                results = await self.stop.unless_requested(self._ask(questions))
            if results is None:
                return
            self.phases.record_generation(result.member for result in results)
            row |= held_out_metrics(name, questions, results)
        first = next(iter(self.task.held_out))
        row |= {f"heldout/{key}": row[f"heldout/{first}/{key}"] for key in ("success", "questions")}
        self.metrics.write({"step": step, **row})
        sets = ", ".join(f"{name} {row[f'heldout/{name}/success']:.1%}" for name in self.task.held_out)
        self.view.phase(f"held-out success at version {self.version()}: {sets}")

    async def _ask(self, questions: Sequence[Prompt]) -> list[EvalResult]:
        sampling = {"temperature": self.config.task.held_out_temperature}
        return await self.worker.evaluate(questions, seed=HELD_OUT_SEED, request_kwargs=sampling)

    async def _save(self) -> None:
        path = self.folder.checkpoints / "hf"
        with self.phases.doing("save", self._trainers()):
            await self.fleet.trainer_call(
                "save_hf", {"path": str(path)}, timeout_s=self.config.runtime.update_timeout_s
            )

    def _trainers(self) -> tuple[str, ...]:
        return tuple(trainer.role for trainer in self.fleet.trainers)

    def _processes(self) -> tuple[str, ...]:
        """The processes that take part in a weight update."""
        return (*self._trainers(), *(role_of(engine) for engine in self.fleet.engine_ids))

    def _reward_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        rewards = [reward or 0.0 for group in groups for reward in group.rewards]
        return {
            "reward/mean": sum(rewards) / len(rewards),
            "reward/success": sum(reward == SUCCESS for reward in rewards) / len(rewards),
        }

    def _staleness_metrics(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Versions the oldest token of each group was behind the weights that trained on it."""
        lags = [step - group.oldest_version for group in groups if group.oldest_version is not None]
        return {"staleness/mean": sum(lags) / len(lags), "staleness/max": max(lags)} if lags else {}


def held_out_metrics(name: str, questions: Sequence[Prompt], results: Sequence[EvalResult]) -> dict[str, float]:
    """Success and number of questions of a set, and of each operation that the questions name."""
    outcomes: dict[str, list[bool]] = {f"heldout/{name}": []}
    for question, result in zip(questions, results, strict=True):
        right = result.reward == SUCCESS
        outcomes[f"heldout/{name}"].append(right)
        if "operation" in question.metadata:
            outcomes.setdefault(f"heldout/{name}/{question.metadata['operation']}", []).append(right)
    success = {f"{key}/success": sum(right) / len(right) for key, right in outcomes.items()}
    return success | {f"{key}/questions": len(right) for key, right in outcomes.items()}


def shuffled_rewards(groups: Sequence[Group], *, seed: int) -> list[Group]:
    """The same groups with the rewards of the whole batch permuted: the control in which nothing can be learned."""
    rewards = [reward for group in groups for reward in group.rewards]
    random.Random(seed).shuffle(rewards)
    pool = iter(rewards)
    return [
        replace(group, members=tuple(_with_reward(member, next(pool)) for member in group.members)) for group in groups
    ]


def _with_reward(member: Member, reward: float | None) -> Member:
    if reward is None:
        return member
    parts = tuple(part.with_reward(reward) for part in member.trajectories)
    return replace(member, trajectories=parts, reward=reward)
