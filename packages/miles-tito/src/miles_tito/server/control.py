"""The driver's route: which weight versions may be named."""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miles_tito.errors import RequestError
from miles_tito.versions import VersionBounds

from .body import read_object
from .problems import ProblemResponse
from .sessions import state_of


async def set_versions(request: Request) -> Response:
    """`POST /control/versions` with `{"begun": w, "acknowledged": {engine_id: v}}`; replaces what was known."""
    state = state_of(request)
    if state.control_token is not None and not _authorised(request, state.control_token):
        return ProblemResponse(401, "unauthorised", "this route wants the control token as a bearer token")
    body = await read_object(request, state.config.server.max_body_bytes)
    begun, acknowledged = body.get("begun"), body.get("acknowledged", {})
    valid = isinstance(acknowledged, dict) and all(_is_version(version) for version in acknowledged.values())
    if body.keys() - {"begun", "acknowledged"} or not _is_version(begun) or not valid:
        raise RequestError(
            f"expected begun, a version, and acknowledged, an object of versions by engine id; got {body}",
            code="invalid_versions",
        )
    state.bounds = VersionBounds(begun, acknowledged)
    return JSONResponse({"begun": begun, "acknowledged": acknowledged})


def _is_version(value: object) -> bool:
    return type(value) is int and value >= 0


def _authorised(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())
