"""Two turns with a calculator in words: the quick start's task.

To `Leo has 12 nuts and buys 34 more. How many nuts does Leo have?` the policy must answer with the right call of the
tool, `<calc>12+34</calc>`; it gets `Result: 46` as a user turn and must answer `46`. Two-digit products are beyond a
small model, so the tool is needed. Two worked examples stand in the prompt, none with a subtraction.

Reward: 1 for the right number in the second turn (one final full stop allowed), 0.2 for a valid call with another
answer, else 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from miles.tasks.arithmetic import calculate
from miles_rollout.data import Prompt
from miles_rollout.protocols import Grade, GradeRequest

CALL = re.compile(r"\s*<calc>([0-9+\-* ]{1,20})</calc>\s*")
VALID_CALL_REWARD = 0.2
NUMBERS = range(11, 100)
NAMES = ("Leo", "Mia", "Sam", "Ana")
THINGS = ("nuts", "pens", "cards", "shells")

TEMPLATES = {
    "+": "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
    "-": "{name} had {a} {thing} and lost {b}. How many {thing} are left?",
    "*": "There are {a} boxes with {b} {thing} each. How many {thing} in all?",
}
FRESH_WORDING = {
    "+": "A shelf holds {a} {thing}. {name} puts {b} {thing} next to them. What is the total number of {thing}?",
    "-": "Out of {a} {thing}, {name} gave away {b}. What number of {thing} remains?",
    "*": "{name} fills {a} bags and each bag gets {b} {thing}. What is the total number of {thing}?",
}
"""Sentences never used in training: success on them is not success on remembered sentences."""

EXAMPLES = (
    ("Leo has 12 nuts and buys 34 more. How many nuts does Leo have?", "<calc>12+34</calc>", "Result: 46", "46"),
    ("There are 15 boxes with 20 nuts each. How many nuts in all?", "<calc>15*20</calc>", "Result: 300", "300"),
)
SYSTEM = "Use the calculator tool, then answer with the number."


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its answer. `sum` is what is asked, such as `12+34`, whatever the words."""

    text: str
    operation: str
    sum: str
    answer: int


def problem(operation: str, templates: dict[str, str], dice: random.Random) -> Problem:
    """A random question of an operation; differences are positive."""
    a, b = dice.choice(NUMBERS), dice.choice(NUMBERS)
    if operation == "-" and a < b:
        a, b = b, a
    text = templates[operation].format(name=dice.choice(NAMES), thing=dice.choice(THINGS), a=a, b=b)
    asked = f"{a}{operation}{b}"
    value = calculate(asked)
    assert value is not None
    return Problem(text, operation, asked, value)


def problems(
    count: int, seed: int, templates: dict[str, str] = TEMPLATES, *, without: Sequence[Problem] = ()
) -> list[Problem]:
    """`count` different questions, the operations in turn, no numbers that `without` asks of the same operation."""
    dice = random.Random(seed)
    seen: set[str] = set()
    taken = {known.sum for known in without}
    found: list[Problem] = []
    operations = cycle(templates)
    while len(found) < count:
        candidate = problem(next(operations), templates, dice)
        if candidate.text not in seen and candidate.sum not in taken:
            seen.add(candidate.text)
            found.append(candidate)
    return found


def prompts(questions: Sequence[Problem], prefix: str) -> list[Prompt]:
    """One prompt a question, with the system turn and the worked examples before it."""
    return [
        Prompt(
            prompt_id=f"{prefix}-{index:05d}",
            messages=(*_opening(), {"role": "user", "content": question.text}),
            label=question.answer,
            metadata={"operation": question.operation},
        )
        for index, question in enumerate(questions)
    ]


def _opening() -> tuple[dict[str, Any], ...]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for question, call, result, answer in EXAMPLES:
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": call},
            {"role": "user", "content": result},
            {"role": "assistant", "content": answer},
        ]
    return tuple(turns)


def use_tool(said: str) -> str | None:
    """What the tool answers to an assistant turn; None when the turn is no valid call."""
    match = CALL.fullmatch(said)
    value = calculate(match[1]) if match else None
    return None if value is None else f"Result: {value}"


def grade(request: GradeRequest) -> Grade:
    """Judge the assistant turns after the worked examples."""
    said = [str(m.get("content") or "") for m in request.messages if m["role"] == "assistant"][2 * len(EXAMPLES) :]
    if len(said) < 2:
        return Grade(0.0, "no valid tool call")
    if request.status == "completed" and said[1].strip().removesuffix(".") == str(request.label):
        return Grade(1.0, "right")
    return Grade(VALID_CALL_REWARD, "wrong answer")
