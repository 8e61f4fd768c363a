"""Request bodies: read within a limit, as strict JSON that can be written as UTF-8."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from miles_tito.errors import RequestError


class BodyTooLargeError(RequestError):
    """A body over the limit, answered 413."""

    default_code = "body_too_large"


async def read_object(request: Request, max_bytes: int, *, optional: bool = False) -> dict[str, Any]:
    """The body as a JSON object; an empty one when `optional` and nothing was sent. Raises `RequestError`."""
    data = await _read(request, max_bytes)
    if optional and not data.strip():
        return {}
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type(value).__name__}, expected an object", code="invalid_json")
    # An escaped lone surrogate is legal JSON but no text: it cannot be encoded into tokens.
    if b"\\u" in data:
        _require_text(value)
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise BodyTooLargeError(f"the body is over {max_bytes} bytes: raise server.max_body_bytes or send less")
    return bytes(data)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _require_text(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the body holds a lone surrogate ({error.object[error.start]!a}), which is not text",
            code="invalid_unicode",
        ) from error
