"""The built-in tasks: their calculator, their questions, and their rewards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import TaskConfig
from miles.tasks import tool_sum, word_problem
from miles.tasks.arithmetic import calculate
from miles.tasks.registry import load_task
from miles_rollout.protocols import GradeRequest


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), max_size=4), st.integers(0, 99))
def test_the_calculator_agrees_with_arithmetic(rest: list[tuple[str, int]], first: int) -> None:
    expression = str(first) + "".join(f"{operator}{number}" for operator, number in rest)
    terms, sign, product = 0, 1, first
    for operator, number in rest:
        if operator == "*":
            product *= number
        else:
            terms, sign, product = terms + sign * product, (1 if operator == "+" else -1), number
    assert calculate(expression) == terms + sign * product


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "1+",
        "+1",
        "1++2",
        "2**9",
        "9**9**9",
        "1 2",
        "1+a",
        "(1+2)",
        "1/2",
        "1.5+1",
        "__import__",
        "1" * 21,
        "٣+1",
    ],
)
def test_what_is_no_sum_is_refused(expression: str) -> None:
    assert calculate(expression) is None


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_sums_are_in_no_training_question(seed: int) -> None:
    task = load_task(TaskConfig(name="word_problem", held_out=60), seed)
    held = [sum_of(prompt.messages[-1]["content"]) for prompts in task.held_out.values() for prompt in prompts]
    assert len(held) == len(set(held)) == 120
    assert not set(held) & {sum_of(prompt.messages[-1]["content"]) for prompt in task.training}
    words = {"".join(c for c in p.messages[-1]["content"] if not c.isdigit()) for p in task.held_out["wording"]}
    assert not words & {"".join(c for c in p.messages[-1]["content"] if not c.isdigit()) for p in task.training}


def sum_of(text: str) -> tuple[str, tuple[str, ...]]:
    numbers = tuple(word.strip(".,?") for word in text.split() if word.strip(".,?").isdigit())
    operation = "*" if "each" in text else "-" if "lost" in text or "gave away" in text else "+"
    return operation, numbers


def test_held_out_questions_do_not_depend_on_the_seed_and_training_does() -> None:
    config = TaskConfig(name="word_problem", held_out=12)
    one, other = load_task(config, 0), load_task(config, 1)
    assert one.held_out == other.held_out
    assert one.training != other.training


def request(*said: str, label: object = 46, status: str = "completed") -> GradeRequest:
    messages = [{"role": "system", "content": word_problem.SYSTEM}]
    for question, call, result, answer in word_problem.EXAMPLES:
        messages += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant") * 2, (question, call, result, answer), strict=True)
        ]
    messages += [{"role": "assistant", "content": text} for text in said]
    return GradeRequest("p", label, messages, {}, status)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "status", "reward"),
    [
        (("<calc>12+34</calc>", "46"), "completed", 1.0),
        (("<calc>12+34</calc>", " 46. "), "completed", 1.0),
        (("<calc>12-34</calc>", "22"), "completed", 0.2),
        (("<calc>12+34</calc>", "46"), "truncated", 0.2),
        (("46",), "completed", 0.0),
    ],
)
def test_word_problem_rewards(said: tuple[str, ...], status: str, reward: float) -> None:
    assert word_problem.grade(request(*said, status=status)).reward == reward


@pytest.mark.parametrize(
    ("said", "answer"),
    [(" <calc>12 + 34</calc>\n", "Result: 46"), ("<calc>2**9</calc>", None), ("12+34", None), ("<calc></calc>", None)],
)
def test_the_tool_is_called_in_one_way(said: str, answer: str | None) -> None:
    assert word_problem.use_tool(said) == answer


def test_the_toys_split_is_disjoint_and_fixed() -> None:
    training, held_out = tool_sum.split_questions(128)
    assert not set(training) & set(held_out)
    assert tool_sum.split_questions(64)[1] == held_out[:64]
    assert tool_sum.calculate("47+25") == "72"
    assert tool_sum.calculate("47*25") is None
