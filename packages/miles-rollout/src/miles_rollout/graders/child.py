"""The grader process: `python -m miles_rollout.graders.child FUNCTION MEMORY_BYTES`.

Reads requests from standard input and answers on what was standard output; whatever the grader prints goes to standard
error. Every grade arms a timer whose default action kills this process, so that it does not outlive a dead parent even
inside a computation that never returns to Python.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from miles_rollout.graders.framing import pack, read_blocking
from miles_rollout.plugins import load_function
from miles_rollout.protocols import Grade, GradeRequest

GRACE_S = 2.0


def main(arguments: list[str]) -> int:
    path, memory_bytes = arguments[0], int(arguments[1])
    requests, replies = _take_pipes()
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        grade = load_function(path, ("request",), kind="grader")
    except Exception as error:  # noqa: BLE001 - importing user code may raise anything; the parent reports it
        _send(replies, {"error": f"{type(error).__name__}: {error}"})
        return 1
    _send(replies, {"ready": True})
    while (message := read_blocking(requests)) is not None:
        _send(replies, _answer(grade, message))
    return 0


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool; printing and reading by the grader cannot disturb them."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _send(replies: BinaryIO, message: Any) -> None:
    replies.write(pack(message))
    replies.flush()


def _answer(function: Callable[..., Any], message: Mapping[str, Any]) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_REAL, message["timeout_s"] + GRACE_S)
    try:
        grade = as_grade(_call(function, GradeRequest(**message["request"])))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - user code; the parent decides what an error is worth
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {"reward": grade.reward, "reason": grade.reason}


def _call(function: Callable[..., Any], request: GradeRequest) -> Any:
    result = function(request)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def as_grade(result: Any) -> Grade:
    """What a grader returned as a grade: a Grade, a number, or a dict with `reward` and perhaps `reason`.

    Raises TypeError or ValueError when it is none of these, or not finite.
    """
    if isinstance(result, Mapping) and "reward" in result:
        result = Grade(result["reward"], str(result.get("reason", "ok")))
    grade = result if isinstance(result, Grade) else Grade(result)
    if not isinstance(grade.reward, int | float):
        raise TypeError(f"a grader gives a number, a Grade or a dict with a reward, not {type(result).__name__}")
    if not math.isfinite(grade.reward):
        raise ValueError(f"the reward {grade.reward} is not finite")
    return Grade(float(grade.reward), grade.reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
