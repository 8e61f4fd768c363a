"""The configuration of a run: the packages' own sections, and those of the whole.

`RunConfig` is frozen; a component gets its own section. `layers.py` builds it from defaults, files, environment and
command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from miles_rollout import RolloutConfig
from miles_tito import TitoConfig
from miles_trainer import TrainerConfig
from miles_weightsync import WeightSyncConfig

MAX_HELD_OUT = 128
"""Questions of the toy's task that its pre-training never sees."""


class Section(BaseModel):
    """A frozen section that refuses unknown options."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """Which model is trained."""

    name: Literal["toy", "smollm2-135m-instruct"] = Field(
        "toy", description="the toy is made and pre-trained in the cache; the other is fetched and converted there"
    )
    path: Path | None = Field(None, description="a Hugging Face folder in its place")
    toy_pretrain_steps: PositiveInt = Field(200, description="supervised steps of the toy's pre-training")
    toy_seed: int = Field(0, description="seed of the toy's weights and pre-training data")


class TaskConfig(Section):
    """What is learned. Prompts, agent and grader belong together."""

    name: Literal["tool_sum", "word_problem"] = Field("tool_sum", description="built-in task")
    prompts_path: Path | None = Field(None, description="JSONL of prompts in place of the task's own training prompts")
    held_out: PositiveInt = Field(64, description="questions of each set kept apart from training")
    held_out_temperature: float = Field(1.0, ge=0, description="temperature of the held-out questions; 0 = greedy")
    shuffle_rewards: bool = Field(
        False, description="control: permute the rewards of each batch; nothing should be learned"
    )


class LoopConfig(Section):
    """How long the loop runs. Batch, group and staleness are options of `rollout`."""

    steps: PositiveInt = Field(24, description="training steps, each followed by a weight update")
    seed: int = Field(0, description="seed of prompts and sampling")
    evaluate: bool = Field(True, description="ask the held-out questions before the first and after the last step")


class NumericsConfig(Section):
    """How forward passes compute, on both sides."""

    batch_invariant: bool = Field(False, description="fixed row blocks: a token's numbers do not depend on its batch")
    block_rows: PositiveInt = Field(32, description="rows of a block")
    max_context: PositiveInt = Field(256, description="keys attention sees; the longest sequence")


class RuntimeConfig(Section):
    """Where the roles run and how long they may take."""

    kind: Literal["local"] = Field("local", description="processes on this machine")
    engines: PositiveInt = Field(1, description="engine processes")
    trainer_ranks: Annotated[int, Field(ge=1, le=2)] = Field(
        1, description="trainer processes, sharing parameters and data"
    )
    start_timeout_s: PositiveFloat = Field(120.0, description="time a role may take to be ready")
    train_timeout_s: PositiveFloat = Field(600.0, description="time a training step may take")
    update_timeout_s: PositiveFloat = Field(300.0, description="time a weight update may take")
    cache: Path | None = Field(None, description="where made models are kept; none = the user's cache folder")


class FaultConfig(Section):
    """A deliberate fault in one role, for drills and sabotage tests. Never set it in a run you want to keep."""

    kind: Literal[
        "flip_token",
        "swap_experts",
        "flip_token_in_transit",
        "swap_experts_in_transit",
        "shift_version",
        "flip_weight_bit",
        "drop_ledger_entry",
    ]
    after: Annotated[int, Field(ge=0)] = Field(2, description="occurrences that pass unharmed first")


class RunConfig(Section):
    """Everything a run depends on."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    loop: LoopConfig = Field(default_factory=LoopConfig)
    numerics: NumericsConfig = Field(default_factory=NumericsConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    tito: TitoConfig = Field(default_factory=TitoConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    weightsync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    faults: tuple[FaultConfig, ...] = Field((), description="deliberate faults")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        limit = self.rollout.buffer.max_staleness
        if self.weightsync.pause_mode == "abort" and limit != 0:
            raise ValueError(
                f"weightsync.pause_mode 'abort' needs rollout.buffer.max_staleness 0, got {limit}: "
                "use 'retract', or --sync"
            )
        if self.weightsync.verify == "off":
            raise ValueError(
                "weightsync.verify cannot be 'off' in a run: weight identity is always checked; use 'probe'"
            )
        if self.task.name == "tool_sum" and self.task.held_out > MAX_HELD_OUT:
            raise ValueError(
                f"task.held_out is {self.task.held_out}; tool_sum keeps at most {MAX_HELD_OUT} questions apart"
            )
        context = self.rollout.engine.max_context
        if self.numerics.batch_invariant and (context is None or context > self.numerics.max_context):
            raise ValueError(
                f"numerics.batch_invariant needs rollout.engine.max_context ({context}) of at most "
                f"numerics.max_context ({self.numerics.max_context}): set the first"
            )
        if self.trainer.replay.enabled and not self.tito.session.record_experts:
            raise ValueError("trainer.replay.enabled needs tito.session.record_experts: nothing would be replayed")
        return self
