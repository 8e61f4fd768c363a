"""The options of miles-rollout. A component receives its own section only."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from miles_rollout.local.config import EngineConfig

FailurePolicy = Literal["fail", "drop", "retry"]
StalenessPolicy = Literal["discard", "admit"]
Granularity = Literal["sample", "group"]
UnusedHandler = Literal["drop", "retry"]
RouterPolicyName = Literal["manual", "round_robin", "least_load"]

PositiveSeconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Where prompts come from and in which order."""

    input_key: str = Field(default="input", description="column with the prompt: text, or a list of messages")
    label_key: str | None = Field(
        default=None, description="column with what the grader compares with; named = required"
    )
    metadata_key: str = Field(default="metadata", description="column with an object for agent and grader")
    id_key: str = Field(default="id", description="column with the prompt id; without it the id is the row's position")
    shuffle: bool = Field(default=False, description="shuffle each epoch with seed + epoch")
    seed: int = Field(default=42, description="seed of the order")
    epochs: int | None = Field(default=None, ge=1, description="passes over the data; none = as many as are drawn")


class BufferConfig(_Section):
    """The bounded buffer of finished groups."""

    capacity_factor: float = Field(default=2.0, gt=0, description="capacity in batches; at least one group is held")
    max_staleness: int | None = Field(
        default=2,
        ge=0,
        description="versions a group's oldest token may lag when the group is handed out; none = no limit",
    )
    unused_handler: UnusedHandler = Field(default="drop", description="what becomes of the prompt of a stale group")
    filter: str | None = Field(
        default=None, description="built-in filter or dotted path; rejected groups are discarded"
    )

    def capacity_groups(self, batch_groups: int) -> int:
        return max(1, math.floor(self.capacity_factor * batch_groups))


class SamplingConfig(_Section):
    """How the policy samples, in the engine's names."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="limit of one turn; none = what the context allows"
    )
    min_new_tokens: int | None = Field(default=None, ge=0)
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None


class WorkerConfig(_Section):
    """The asynchronous worker."""

    batch_groups: int = Field(default=8, ge=1, description="groups in a training batch")
    group_size: int = Field(default=8, ge=1, description="trajectories of one prompt")
    max_concurrent_samples: int | None = Field(
        default=None, ge=1, description="trajectories under way at once, in whole groups; none = one batch of groups"
    )
    granularity: Granularity = Field(
        default="sample", description="what frees a submission slot: a trajectory or a group"
    )
    staleness_policy: StalenessPolicy = Field(
        default="discard", description="discard: throw stale groups away; admit: submit only what cannot become stale"
    )
    failure_policy: FailurePolicy = Field(default="retry", description="what becomes of the prompt of a failed group")
    max_tries: int = Field(default=3, ge=1, description="tries per prompt and epoch under retry, then it is dropped")
    max_consecutive_failures: int | None = Field(
        default=None, ge=1, description="prompts in a row whose groups failed that end the run; none = one batch"
    )
    max_consecutive_rejects: int | None = Field(
        default=None, ge=0, description="filtered groups in a row that end the run; 0 = never; none = 80 batches"
    )
    require_versions: bool = Field(default=True, description="a trajectory without weight versions fails its group")
    group_timeout_s: PositiveSeconds = Field(
        default=1800.0, description="deadline of one group, from submission to grades"
    )
    create_timeout_s: PositiveSeconds = Field(default=30.0, description="deadline of creating a session")
    collect_timeout_s: PositiveSeconds = Field(default=120.0, description="deadline of collecting a session")
    delete_timeout_s: PositiveSeconds = Field(default=10.0, description="deadline of deleting a session")
    cancel_grace_s: PositiveSeconds = Field(
        default=5.0, description="time a cancelled agent has to end before it is abandoned"
    )
    no_progress_warn_s: PositiveSeconds = Field(
        default=30.0, description="without a finished group a warning names the oldest"
    )
    no_progress_timeout_s: PositiveSeconds | None = Field(
        default=None, description="without a finished group a waiting batch is an error"
    )
    eval_concurrency: int = Field(default=32, ge=1, description="evaluation trajectories under way at once")
    max_seq_len: int | None = Field(default=None, ge=1, description="told to agents as metadata `max_seq_len`")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)

    @model_validator(mode="after")
    def _whole_groups_fit(self) -> WorkerConfig:
        limit = self.max_concurrent_samples
        if limit is not None and limit < self.group_size:
            raise ValueError(
                f"max_concurrent_samples is {limit} and a group has {self.group_size} trajectories: "
                "raise the first to at least the second"
            )
        return self

    @property
    def in_flight_groups(self) -> int:
        """The submission budget in whole groups."""
        if self.max_concurrent_samples is None:
            return self.batch_groups
        return max(1, self.max_concurrent_samples // self.group_size)


class GraderConfig(_Section):
    """The pool of grader processes."""

    function: str | None = Field(default=None, description="grader as package.module:function")
    processes: int = Field(default=2, ge=1, description="grades given at once")
    timeout_s: PositiveSeconds = Field(
        default=30.0, description="deadline of one grade; later = reward 0, process killed"
    )
    start_timeout_s: PositiveSeconds = Field(
        default=60.0, description="deadline of starting a process and loading the grader"
    )
    memory_bytes: int | None = Field(
        default=4 * 1024**3, ge=64 * 1024**2, description="address space of a grader process; none = no limit"
    )
    max_message_bytes: int = Field(default=64 * 1024**2, ge=1024, description="largest request or reply")
    error_policy: Literal["zero", "fail"] = Field(
        default="zero", description="a grader that raises: reward 0, or a failed group"
    )


class RouterConfig(_Section):
    """The router in front of the engines."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = a free port, which is announced")
    policy: RouterPolicyName = "manual"
    assignment: Literal["min_load", "random"] = Field(default="min_load", description="how `manual` places a new key")
    seed: int = Field(default=42, description="seed of `random` assignment")
    key_idle_s: PositiveSeconds = Field(default=4 * 3600.0, description="a key unused for so long loses its place")
    workers: tuple[str, ...] = Field(default=(), description="engine URLs known at start")
    health_interval_s: PositiveSeconds = 10.0
    health_timeout_s: PositiveSeconds = 5.0
    failure_threshold: int = Field(default=3, ge=1, description="failures in a row that quarantine a worker")
    success_threshold: int = Field(default=2, ge=1, description="successes in a row that a worker needs to come back")
    failover_tries: int = Field(
        default=2, ge=0, description="further tries after a connection failure, on other workers first"
    )
    failover_pause_s: PositiveSeconds = Field(
        default=0.2, description="pause before a worker that gave no answer is tried again"
    )
    connect_timeout_s: PositiveSeconds = 10.0
    request_timeout_s: PositiveSeconds = Field(
        default=14400.0, description="silence of an engine after which a request fails"
    )
    max_request_bytes: int = Field(default=256 * 1024**2, ge=1, description="largest request body")
    max_connections: int = Field(default=4096, ge=1)


class RolloutConfig(_Section):
    """All options of miles-rollout."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    graders: GraderConfig = Field(default_factory=GraderConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="after")
    def _policies_agree(self) -> RolloutConfig:
        if self.worker.staleness_policy == "admit" and self.buffer.max_staleness is None:
            raise ValueError("worker.staleness_policy 'admit' needs buffer.max_staleness: set the limit it admits to")
        if self.buffer.filter == "nonzero_std" and self.worker.group_size == 1:
            raise ValueError("buffer.filter 'nonzero_std' rejects every group of one: raise worker.group_size")
        return self
