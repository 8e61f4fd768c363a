"""The calculator's language: integers, `+`, `-`, `*`, with the usual precedence. Parsed, never evaluated by Python."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\s*(?:([0-9]{1,9})|([+\-*]))")
MAX_LENGTH = 20


def calculate(expression: str) -> int | None:
    """The value of `12+34*5`; None when it is not `number (operator number)*` or is over `MAX_LENGTH` characters."""
    numbers, operators = _tokens(expression)
    if numbers is None:
        return None
    total, sign, product = 0, 1, numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        else:
            total += sign * product
            sign, product = (1 if operator == "+" else -1), number
    return total + sign * product


def _tokens(expression: str) -> tuple[list[int] | None, list[str]]:
    """Numbers and the operators between them; no numbers when they do not alternate."""
    numbers: list[int] = []
    operators: list[str] = []
    position = 0
    text = expression.rstrip()
    if not text or len(text) > MAX_LENGTH:
        return None, []
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or (match[1] is None) != (len(numbers) > len(operators)):
            return None, []
        if match[1] is not None:
            numbers.append(int(match[1]))
        else:
            operators.append(match[2])
        position = match.end()
    return (numbers, operators) if len(numbers) == len(operators) + 1 else (None, [])
