"""Two turns with a calculator: the toy's task.

The user asks `47 plus 25`; the policy must call the tool with `47+25`; the tool answers `72` as a user turn; the
policy must answer `72`. The pre-trained toy knows the form but calls the tool with the wrong operator more often than
not, so success starts low and the operator is what there is to learn. Reward: 1 for the right answer, 0.2 for a
well-formed call whose answer is wrong, else 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles_rollout.data import Prompt
from miles_rollout.protocols import Grade, GradeRequest

CALL = re.compile(r"([0-9]{2})([+-])([0-9]{2})")
VALID_CALL_REWARD = 0.2
FIRST_OPERANDS = range(30, 61)
SECOND_OPERANDS = range(10, 40)


@dataclass(frozen=True, slots=True)
class Question:
    """`first plus second`; operands are such that sum and difference both have two digits."""

    first: int
    second: int

    @property
    def text(self) -> str:
        return f"{self.first} plus {self.second}"

    @property
    def answer(self) -> str:
        return str(self.first + self.second)


def all_questions() -> list[Question]:
    """Every question of the task, in a fixed order."""
    return [Question(a, b) for a in FIRST_OPERANDS for b in SECOND_OPERANDS if a - b >= 10]


def split_questions(held_out: int, seed: int = 1234) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions), disjoint; the split depends on `seed` alone."""
    questions = all_questions()
    if not 0 < held_out < len(questions):
        raise ValueError(f"held_out must lie in 1 … {len(questions) - 1}, got {held_out}")
    random.Random(seed).shuffle(questions)
    return questions[held_out:], questions[:held_out]


def prompts(questions: Sequence[Question], prefix: str) -> list[Prompt]:
    """One prompt a question, ids `<prefix>-00000` on."""
    return [
        Prompt(
            prompt_id=f"{prefix}-{index:05d}",
            messages=({"role": "user", "content": question.text},),
            label=question.answer,
            metadata={},
        )
        for index, question in enumerate(questions)
    ]


def calculate(call: str) -> str | None:
    """The tool: `47+25` → `72`; None when the call is not well formed."""
    match = CALL.fullmatch(call)
    if match is None:
        return None
    first, operator, second = int(match[1]), match[2], int(match[3])
    return str(first + second if operator == "+" else first - second)


def grade(request: GradeRequest) -> Grade:
    """1 for the right answer in the second turn, `VALID_CALL_REWARD` for a used tool, else 0."""
    said = [str(message.get("content") or "") for message in request.messages if message["role"] == "assistant"]
    if len(said) < 2:
        return Grade(0.0, "no valid tool call")
    if request.status == "completed" and said[1] == request.label:
        return Grade(1.0, "right")
    return Grade(VALID_CALL_REWARD, "wrong answer")
