"""Errors on the wire: `application/problem+json` with a stable `code`."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from miles_tito.errors import (
    EngineError,
    EngineStatusError,
    IdentityViolation,
    RequestError,
    SessionBusyError,
    SessionLimitError,
    SessionNotFoundError,
    TemplateError,
    TitoError,
    TruncatedTurnError,
)

# The first class that fits decides.
_STATUS: tuple[tuple[type[TitoError], int], ...] = (
    (RequestError, 400),
    (TemplateError, 400),
    (SessionNotFoundError, 404),
    (SessionBusyError, 409),
    (TruncatedTurnError, 409),
    (IdentityViolation, 409),
    (SessionLimitError, 429),
    (EngineError, 502),
)


class ProblemResponse(JSONResponse):
    """A problem document. `error` repeats it in the form that OpenAI clients show."""

    media_type = "application/problem+json"

    def __init__(self, status: int, code: str, detail: str, **extra: Any) -> None:
        body = {
            "type": f"urn:miles:tito:{code}",
            "title": code.replace("_", " "),
            "status": status,
            "code": code,
            "detail": detail,
            **extra,
            "error": {"message": detail, "type": code, "code": code, "param": extra.get("field")},
        }
        super().__init__(body, status_code=status)


def problem_of(error: TitoError) -> ProblemResponse:
    """The response for an error of ours. Engine statuses are passed on."""
    if isinstance(error, EngineStatusError):
        return ProblemResponse(error.status, error.code, str(error))
    status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
    where = {}
    if isinstance(error, RequestError):
        known = {"message_index": error.message_index, "field": error.field}
        where = {name: value for name, value in known.items() if value is not None}
    return ProblemResponse(status, error.code, str(error), **where)
