"""Evaluation on the session path of training: the same sessions, agent and grader, its own seeds and concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_rollout.data.prompts import Prompt
from miles_rollout.episodes import EpisodeRunner
from miles_rollout.group_run import GroupRunner
from miles_rollout.groups import Member
from miles_rollout.seeds import derive_seed


@dataclass(frozen=True, slots=True, eq=False)
class EvalResult:
    """One evaluated trajectory. An aborted one has no reward and counts as 0 in `eval_metrics`."""

    prompt_id: str
    sample: int
    member: Member

    @property
    def reward(self) -> float | None:
        return self.member.reward


async def evaluate(
    episodes: EpisodeRunner,
    runner: GroupRunner,
    prompts: Sequence[Prompt],
    *,
    sampling: Mapping[str, Any],
    seed: int,
    samples_per_prompt: int,
    concurrency: int,
) -> list[EvalResult]:
    """Results in the order of the prompts. A sample past the runner's deadline is aborted; a fatal error ends all."""
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt, sample: int) -> EvalResult:
        member_seed = derive_seed(seed, prompt.prompt_id, 0, sample)
        metadata = {"prompt_id": prompt.prompt_id, "member": sample, "evaluation": True}
        async with slots:
            episode = episodes.run(prompt, seed=member_seed, sampling=sampling, metadata=metadata)
            name = f"evaluation of prompt {prompt.prompt_id!r}, sample {sample},"
            [outcome] = await runner.run(name, [episode], seeds=[member_seed], on_member_end=lambda: None)
        return EvalResult(prompt.prompt_id, sample, outcome.member)

    tasks = [asyncio.create_task(one(p, s)) for p in prompts for s in range(samples_per_prompt)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def eval_metrics(results: Sequence[EvalResult], *, name: str) -> dict[str, float]:
    """`eval/<name>` (mean, no reward counts 0) and the shares of results without a reward and cut short."""
    if not results:
        return {}
    count = len(results)
    return {
        f"eval/{name}": sum(result.reward or 0.0 for result in results) / count,
        f"eval/{name}-none_reward_ratio": sum(result.reward is None for result in results) / count,
        f"eval/{name}-truncated_ratio": sum(result.member.status == "truncated" for result in results) / count,
    }
