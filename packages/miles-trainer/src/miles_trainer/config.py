"""The trainer's configuration: one frozen root, nested sections, unknown options refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from miles_trainer.refusals import check_options

Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen section; a misspelt option is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimizerConfig(Section):
    """AdamW with a global norm clip and a constant learning rate after a linear warm-up."""

    learning_rate: Positive = Field(default=1e-6, description="learning rate after the warm-up")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: Positive = Field(default=1e-8)
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    clip_grad_norm: Positive = Field(
        default=1.0, description="largest global gradient norm; larger ones are scaled down"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="optimizer steps over which the rate grows linearly; skipped ones do not count"
    )


class KlConfig(Section):
    """Distance from the frozen starting weights, added to the loss."""

    coef: float = Field(
        default=0.0, ge=0, description="coefficient in the loss; above 0 a reference copy of the model is loaded"
    )
    reward_coef: float = Field(default=0.0, ge=0, description="coefficient in the reward; GRPO has no place for it")
    estimator: Literal["k1", "k2", "k3", "low_var"] = Field(
        default="low_var", description="per-token estimator, spec 1.6"
    )
    unbiased: bool = Field(default=False, description="multiply by the policy ratio, with its gradient")


class TisConfig(Section):
    """Truncated importance sampling between the trainer's and the rollout's log-probabilities."""

    enabled: bool = True
    low: float = Field(default=0.0, ge=0)
    high: Positive = Field(default=2.0)


class ObjectiveConfig(Section):
    """Advantages, policy loss, corrections and the reducer."""

    estimator: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(default=True, description="divide by the group's unbiased standard deviation + 1e-6")
    clip_low: Positive = Field(default=0.2, description="ratio is clipped at 1 - clip_low")
    clip_high: Positive = Field(default=0.2, description="ratio is clipped at 1 + clip_high")
    dual_clip: float | None = Field(
        default=None, description="bound c > 1 on the loss of negative advantages; none: off"
    )
    tis: TisConfig = TisConfig()
    kl: KlConfig = KlConfig()
    entropy_coef: float = Field(default=0.0, ge=0)
    old_logprobs: Literal["recompute", "update_pass"] = Field(
        default="recompute",
        description="source of the old log-probabilities: a pass of their own before the first optimizer step, or "
        "the only update pass itself (ratio exactly 1, half the forward work)",
    )
    aggregation: Literal["sample_mean", "token_mean", "constant"] = Field(
        default="sample_mean",
        description="mean over each rollout's tokens, then over rollouts; over all tokens; or a constant",
    )
    constant_divisor: float | None = Field(
        default=None, gt=0, description="tokens a rollout counts as, for aggregation = constant"
    )


class PackingConfig(Section):
    """How sequences share a forward pass."""

    max_tokens: int = Field(
        default=4096, ge=1, description="tokens that one micro-batch computes; a longer sequence gets its own"
    )
    share_prefixes: bool = Field(
        default=True, description="compute a token prefix that samples of a micro-batch have in common once"
    )
    min_shared_tokens: int = Field(
        default=4, ge=1, description="shorter common runs are computed by each sample: a split costs an attention call"
    )
    log_probs_chunk: int = Field(
        default=128,
        ge=1,
        description="predictions whose probabilities are held at once; bounds memory, changes no number",
    )


class ReplayConfig(Section):
    """Replay of the rollout's routed experts (R3)."""

    enabled: bool = Field(
        default=False, description="replace the routers' choices by the recorded ones; needs a model with routers"
    )


class FsdpConfig(Section):
    """The FSDP2 backend."""

    reshard_after_forward: bool = True
    collective_timeout_s: Positive = Field(default=600.0, description="longest wait of one collective")


class CheckpointConfig(Section):
    """Where and how often the trainer's command saves. A driver may call `Trainer.save` itself."""

    dir: Path | None = None
    every_steps: int = Field(default=0, ge=0, description="0: only at the end, and only with a folder")
    keep: int = Field(default=2, ge=1, description="complete checkpoints that stay")


class TrainerConfig(Section):
    """Root of the trainer's options."""

    seed: int = Field(default=1234, ge=0)
    n_updates_per_batch: int = Field(
        default=1, ge=1, description="optimizer steps on one batch; old log-probabilities stay fixed"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    packing: PackingConfig = PackingConfig()
    replay: ReplayConfig = ReplayConfig()
    fsdp: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _options_go_together(self) -> TrainerConfig:
        check_options(self)
        return self

    def training_options(self) -> dict[str, Any]:
        """The options that decide the numbers of a run, as plain JSON data."""
        return self.model_dump(mode="json", exclude={"checkpoint": True, "fsdp": True})

    def digest(self) -> str:
        """SHA-256 over the options that decide the numbers of a run."""
        return hashlib.sha256(json.dumps(self.training_options(), sort_keys=True).encode()).hexdigest()
