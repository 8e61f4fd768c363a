"""Options that are refused together, as data. A test covers each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_trainer.errors import TrainerConfigError

if TYPE_CHECKING:
    from miles_trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row: a stable code, when it applies, and what to do instead."""

    code: str
    applies: Callable[[TrainerConfig], bool]
    message: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "kl_twice",
        lambda c: c.objective.kl.coef > 0 and c.objective.kl.reward_coef > 0,
        "objective.kl.coef and objective.kl.reward_coef are both set: the same distance would count twice; keep one",
    ),
    Refusal(
        "kl_in_reward_with_grpo",
        lambda c: c.objective.kl.reward_coef > 0,
        "objective.kl.reward_coef has no effect with estimator grpo, whose advantage is one value a rollout: "
        "use objective.kl.coef",
    ),
    Refusal(
        "unbiased_without_kl",
        lambda c: c.objective.kl.unbiased and c.objective.kl.coef == 0,
        "objective.kl.unbiased has no effect while objective.kl.coef is 0: set the coefficient or leave it out",
    ),
    Refusal(
        "dual_clip_bound",
        lambda c: c.objective.dual_clip is not None and c.objective.dual_clip <= 1,
        "objective.dual_clip must be above 1: at 1 or below it would cut losses that no ratio has inflated",
    ),
    Refusal(
        "tis_bounds",
        lambda c: c.objective.tis.enabled and c.objective.tis.low > c.objective.tis.high,
        "objective.tis.low is above objective.tis.high: swap them",
    ),
    Refusal(
        "clip_low_range",
        lambda c: c.objective.clip_low >= 1,
        "objective.clip_low must be below 1: the lower bound 1 - clip_low would not be positive",
    ),
    Refusal(
        "constant_without_divisor",
        lambda c: c.objective.aggregation == "constant" and c.objective.constant_divisor is None,
        "objective.aggregation = constant needs objective.constant_divisor (tokens, for example 1000)",
    ),
    Refusal(
        "divisor_without_constant",
        lambda c: c.objective.aggregation != "constant" and c.objective.constant_divisor is not None,
        "objective.constant_divisor has no effect unless objective.aggregation = constant",
    ),
    Refusal(
        "update_pass_repeated",
        lambda c: c.objective.old_logprobs == "update_pass" and c.n_updates_per_batch > 1,
        "objective.old_logprobs = update_pass holds for one optimizer step a batch, and n_updates_per_batch is above "
        "1: use recompute",
    ),
    Refusal(
        "save_without_folder",
        lambda c: c.checkpoint.every_steps > 0 and c.checkpoint.dir is None,
        "checkpoint.every_steps is set and checkpoint.dir is not: name the folder",
    ),
)


def check_options(config: TrainerConfig) -> None:
    """Raise TrainerConfigError naming every row of `REFUSALS` that applies."""
    broken = [f"[{row.code}] {row.message}" for row in REFUSALS if row.applies(config)]
    if broken:
        raise TrainerConfigError("; ".join(broken))
