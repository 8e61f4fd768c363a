"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles.config import TaskConfig
from miles.tasks import RolloutTask, tool_sum, word_problem
from miles.tasks.calculator_agent import CalculatorAgent

TRAINING_PROBLEMS = 3000
NUMBERS_SEED = 1234
WORDING_SEED = 4321
TRAINING_SEED = 99


def load_task(config: TaskConfig, seed: int) -> RolloutTask:
    """The task the configuration names. `seed` is the run's: held-out questions do not depend on it."""
    return _TASKS[config.name](config, seed)


def _tool_sum(config: TaskConfig, seed: int) -> RolloutTask:
    training, held_out = tool_sum.split_questions(config.held_out)
    agent = CalculatorAgent(tool_sum.calculate)
    return RolloutTask(
        training=tool_sum.prompts(training, "train"),
        held_out={"numbers": tool_sum.prompts(held_out, "held-out")},
        agent=agent,
        grader="miles.tasks.tool_sum:grade",
        close=agent.aclose,
    )


def _word_problem(config: TaskConfig, seed: int) -> RolloutTask:
    numbers = word_problem.problems(config.held_out, NUMBERS_SEED)
    wording = word_problem.problems(config.held_out, WORDING_SEED, word_problem.FRESH_WORDING, without=numbers)
    training = word_problem.problems(TRAINING_PROBLEMS, TRAINING_SEED + seed, without=[*numbers, *wording])
    agent = CalculatorAgent(word_problem.use_tool)
    return RolloutTask(
        training=word_problem.prompts(training, "train"),
        held_out={
            "numbers": word_problem.prompts(numbers, "numbers"),
            "wording": word_problem.prompts(wording, "wording"),
        },
        agent=agent,
        grader="miles.tasks.word_problem:grade",
        close=agent.aclose,
    )


_TASKS: Mapping[str, Callable[[TaskConfig, int], RolloutTask]] = {"tool_sum": _tool_sum, "word_problem": _word_problem}
