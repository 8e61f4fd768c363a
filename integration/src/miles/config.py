"""The configuration of a run: the packages' own sections, and those of the whole.

`RunConfig` is frozen; a component gets its own section. `layers.py` builds it from defaults, files, environment and command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from miles_diffusion import DiffusionConfig
from miles_quant import QuantConfig
from miles_rollout import RolloutConfig
from miles_tito import TitoConfig
from miles_trainer import TrainerConfig
from miles_weightsync import WeightSyncConfig
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class Section(BaseModel):
    """A frozen section that refuses unknown options."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """Which model is trained."""

    path: Path | None = Field(None, description="Hugging Face folder; none = the toy, made and pre-trained in the cache")
    family: str = Field("smollm2", description="chat family of miles-tito")
    toy_pretrain_steps: PositiveInt = Field(240, description="supervised steps of the toy's pre-training")
    toy_seed: int = Field(0, description="seed of the toy's weights and pre-training data")


class TaskConfig(Section):
    """What is learned. Prompts, agent and grader belong together."""

    name: Literal["tool_sum"] = Field("tool_sum", description="built-in task")
    prompts_path: Path | None = Field(None, description="JSONL of prompts in place of the task's own training prompts")
    held_out: PositiveInt = Field(64, description="questions kept apart from training, asked before and after")
    max_new_tokens: PositiveInt = Field(12, description="tokens a turn")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature, in training and evaluation")
    shuffle_rewards: bool = Field(False, description="control: permute the rewards of each batch; nothing should be learned")


class LoopConfig(Section):
    """The loop: how much, and how far rollout may run ahead of training."""

    steps: PositiveInt = Field(24, description="training steps, each followed by a weight update")
    prompts_per_step: PositiveInt = Field(4, description="groups of a batch")
    samples_per_prompt: Annotated[int, Field(ge=2)] = Field(8, description="members of a group")
    max_staleness: Annotated[int, Field(ge=0)] = Field(1, description="versions a trained token may be behind the trainer")
    sync: bool = Field(False, description="limit 0 and admission control: generate, train, update in turn")
    seed: int = Field(0, description="seed of prompts order and sampling")
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
    trainer_ranks: Annotated[int, Field(ge=1, le=2)] = Field(1, description="trainer processes, sharing parameters and data")
    start_timeout_s: PositiveFloat = Field(120.0, description="time a role may take to be ready")
    train_timeout_s: PositiveFloat = Field(600.0, description="time a training step may take")
    update_timeout_s: PositiveFloat = Field(300.0, description="time a weight update may take")
    batch_timeout_s: PositiveFloat = Field(600.0, description="time without a full batch after which the run fails")
    router_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="port of the router; 0 = any free one")
    session_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="port of the session server; 0 = any free one")


class FaultConfig(Section):
    """A deliberate fault in one role, for chaos drills and our own sabotage tests. Never set it in a run you want to keep."""

    kind: Literal["flip_token", "swap_experts", "shift_version", "flip_weight_bit", "drop_ledger_entry"]
    after: Annotated[int, Field(ge=0)] = Field(2, description="occurrences that pass unharmed first")


class RunConfig(Section):
    """Everything a run depends on."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    loop: LoopConfig = LoopConfig()
    numerics: NumericsConfig = NumericsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tito: TitoConfig = TitoConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    weightsync: WeightSyncConfig = WeightSyncConfig()
    quant: QuantConfig = QuantConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    faults: tuple[FaultConfig, ...] = Field((), description="deliberate faults")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.loop.sync and self.loop.max_staleness != 0:
            raise ValueError(f"loop.sync needs loop.max_staleness 0, got {self.loop.max_staleness}")
        if self.weightsync.pause_mode == "abort" and self.loop.max_staleness != 0:
            raise ValueError(
                f"weightsync.pause_mode 'abort' needs loop.max_staleness 0, got {self.loop.max_staleness}: "
                "use 'retract', or --sync"
            )
        context = self.rollout.engine.max_context
        if self.numerics.batch_invariant and context > self.numerics.max_context:
            raise ValueError(
                f"rollout.engine.max_context {context} is over numerics.max_context {self.numerics.max_context}"
            )
        return self
