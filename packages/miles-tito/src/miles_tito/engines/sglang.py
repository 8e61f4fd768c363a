"""Client of SGLang's native API (`/generate`) with the extensions of `contracts/README.md`. Works with stock engines
too."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx

from miles_tito.config import EngineConfig
from miles_tito.errors import EngineReplyError, EngineStatusError, EngineUnreachableError
from miles_tito.protocols import EngineInfo, GenerateReply, GenerateRequest, MoeInfo

from .checks import check_reply
from .wire import decode_reply, encode_request, integer, version_number

RETRY_STATUS = frozenset({429, 502, 503, 504})
ROUTING_HEADER = "X-SMG-Routing-Key"


class SGLangEngine:
    """A `TokenEngine` over HTTP. `base_url` is an engine or a router; the session key goes into the routing header.

    `moe` is the shape of expert rows; without it `/model_info` is asked once, when rows are first wanted.
    Recorded routes of a prefix are sent only to an engine that says there that it replays them.
    Connection failures and statuses 429, 502, 503, 504 are repeated with growing pauses within `timeout_s`; nothing
    else is.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = 600.0,
        client: httpx.AsyncClient | None = None,
        moe: MoeInfo | None = None,
        max_retries: int = 6,
        backoff_s: float = 0.2,
        backoff_cap_s: float = 5.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._moe = moe
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._backoff_cap_s = backoff_cap_s
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = client or httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    @classmethod
    def from_config(cls, config: EngineConfig, *, url: str, token: str | None = None) -> SGLangEngine:
        """A client with the options of a configuration section."""
        return cls(
            url,
            token=token,
            timeout_s=config.timeout_s,
            max_retries=config.max_retries,
            backoff_s=config.backoff_s,
            backoff_cap_s=config.backoff_cap_s,
        )

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample a continuation. Raises `EngineUnreachableError`, `EngineStatusError`, `EngineReplyError` or an
        identity error."""
        if request.want_experts and self._moe is None:
            self._moe = (await self.describe()).moe
        if request.expert_prefix is not None and not (self._moe and self._moe.replays_routes):
            request = replace(request, expert_prefix=None)
        headers = {ROUTING_HEADER: request.session_key}
        answer = await self._call("POST", "/generate", json_body=encode_request(request), headers=headers)
        reply = decode_reply(request, _object("/generate", answer), self._moe)
        check_reply(request, reply)
        return reply

    async def abort(self, request_id: str) -> None:
        """Cancel a request. Best effort: an engine that is gone has nothing to cancel."""
        try:
            await self._client.post(
                f"{self.base_url}/abort_request", json={"rid": request_id}, headers=self._headers, timeout=10.0
            )
        except httpx.TransportError:
            return

    async def describe(self) -> EngineInfo:
        """What the engine says of itself, from `/model_info` or the older `/get_model_info`."""
        try:
            answer = await self._call("GET", "/model_info")
        except EngineStatusError as error:
            if error.status != 404:
                raise
            answer = await self._call("GET", "/get_model_info")
        return _engine_info(self.base_url, _object("/model_info", answer))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, *, json_body: Any = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        deadline_s = time.monotonic() + self._timeout_s
        attempt = 0
        while True:
            failure, answer = await self._attempt(method, path, json_body, headers, deadline_s)
            if answer is not None and answer.status_code not in RETRY_STATUS:
                return _successful(f"{self.base_url}{path}", answer)
            pause_s = min(self._backoff_cap_s, self._backoff_s * 2**attempt)
            if attempt >= self._max_retries or time.monotonic() + pause_s >= deadline_s:
                if answer is not None:
                    return _successful(f"{self.base_url}{path}", answer)
                raise EngineUnreachableError(
                    f"{self.base_url}{path} could not be reached in {attempt + 1} attempts within {self._timeout_s} "
                    f"s: {failure}; is "
                    "the engine running there?"
                )
            attempt += 1
            await asyncio.sleep(pause_s)

    async def _attempt(
        self, method: str, path: str, json_body: Any, headers: Mapping[str, str] | None, deadline_s: float
    ) -> tuple[str, httpx.Response | None]:
        """One try: an answer, or the text of a connection failure. A deadline that passes while waiting is final."""
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            answer = await self._client.request(
                method,
                f"{self.base_url}{path}",
                json=json_body,
                headers={**self._headers, **(headers or {})},
                timeout=httpx.Timeout(left_s, connect=min(10.0, left_s)),
            )
        except httpx.ReadTimeout as error:
            raise EngineUnreachableError(
                f"{self.base_url}{path} did not answer within {self._timeout_s} s: raise engine.timeout_s or look at "
                "the engine",
                code="engine_timeout",
            ) from error
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}", None
        return "", answer


def _successful(url: str, answer: httpx.Response) -> httpx.Response:
    if answer.status_code < 400:
        return answer
    detail, code = answer.text[:500], None
    try:
        body = answer.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        detail = str(body.get("detail") or body.get("message") or body.get("error") or detail)[:500]
        code = body["code"] if isinstance(body.get("code"), str) else None
    raise EngineStatusError(f"{url} answered {answer.status_code}: {detail}", status=answer.status_code, code=code)


def _object(path: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        body = json.loads(answer.content)
    except (ValueError, RecursionError) as error:
        raise EngineReplyError(f"{path}: the engine's answer is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise EngineReplyError(f"{path}: the engine's answer is {type(body).__name__}, not an object")
    return body


def _engine_info(url: str, body: Mapping[str, Any]) -> EngineInfo:
    moe = body.get("moe")
    version = body.get("weight_version")
    context = body.get("max_context")
    return EngineInfo(
        engine_id=str(body.get("engine_id") or url),
        model_path=str(body.get("model_path", "")),
        weight_version=None if version is None else version_number(version),
        moe=_moe_info(moe) if isinstance(moe, Mapping) else None,
        max_context=context if type(context) is int else None,
    )


def _moe_info(moe: Mapping[str, Any]) -> MoeInfo:
    layers = moe.get("layers")
    if not isinstance(layers, list):
        raise EngineReplyError(f"/model_info: moe {dict(moe)} has no list of layers")
    return MoeInfo(
        tuple(integer(layer, "moe.layers") for layer in layers),
        integer(moe.get("num_experts"), "moe.num_experts"),
        integer(moe.get("top_k"), "moe.top_k"),
        moe.get("replays_routes") is True,
    )
