"""Errors as `application/problem+json` with a stable `code`."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miles_rollout.local.errors import EngineError


def problem(status: int, code: str, detail: str, *, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return a problem. `success` and `message` are there for clients of SGLang's control routes."""
    body = {
        "type": f"urn:miles:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
        "success": False,
        "message": detail,
    }
    return JSONResponse(body, status, headers, media_type="application/problem+json")


async def engine_problem(_request: Request, error: Exception) -> Response:
    """Exception handler for `EngineError`."""
    assert isinstance(error, EngineError)
    headers = {"Retry-After": "1"} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return problem(error.status, error.code, str(error), headers=headers)


async def http_problem(_request: Request, error: Exception) -> Response:
    """Exception handler for what the routing refuses."""
    assert isinstance(error, HTTPException)
    code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return problem(error.status_code, code, error.detail)


async def internal_problem(_request: Request, error: Exception) -> Response:
    """Exception handler for everything else: the server's log has the trace, the client gets nothing of it."""
    return problem(500, "internal_error", f"the server failed ({type(error).__name__}); its log has the reason")
