"""Control of an engine that speaks SGLang's HTTP API: pause, flush, weights from a folder or over torch.distributed.

HTTP 200 with `"success": false` exists there: both are checked, and both end in `EngineControlError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from miles_rollout.errors import RolloutError
from miles_rollout.protocols import PauseMode

FLUSH_INTERVAL_S = 1.0


class EngineControlError(RolloutError, RuntimeError):
    """An engine refused a control call, or did not answer. `status` is None without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine says about its model. A label that is no number (stock `default`) is version 0."""

    model_path: str
    weight_version: int
    engine_id: str | None
    moe: Mapping[str, Any] | None


class EngineControl:
    """Async client of one engine's control routes.

    Args:
        base_url: e.g. `http://127.0.0.1:30000`.
        token: bearer token of the control routes.
        timeout_s: deadline of each call.
        client: an `httpx.AsyncClient` to use instead of an own one, e.g. over a memory transport.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = client or httpx.AsyncClient()
        self._owns_client = client is None

    async def __aenter__(self) -> EngineControl:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._owns_client:
            await self._client.aclose()

    async def healthy(self) -> bool:
        """True when `/health` answers 200 in time."""
        try:
            return (await self._send("GET", "/health")).status_code == httpx.codes.OK
        except EngineControlError:
            return False

    async def model_info(self) -> ModelInfo:
        """Ask `/model_info`, or the older `/get_model_info`."""
        response = await self._send("GET", "/model_info")
        if response.status_code == httpx.codes.NOT_FOUND:
            response = await self._send("GET", "/get_model_info")
        info = self._checked("model_info", response)
        label = str(info.get("weight_version", ""))
        version = int(label) if label.isascii() and label.isdecimal() else 0
        return ModelInfo(str(info.get("model_path", "")), version, info.get("engine_id"), info.get("moe"))

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation. The mode is always sent: SGLang's own default is abort."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def flush(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache; a busy engine is asked again each second until the deadline."""
        last = ""
        try:
            async with asyncio.timeout(timeout_s):
                while (response := await self._send("POST", "/flush_cache")).status_code != httpx.codes.OK:
                    last = response.text
                    await asyncio.sleep(FLUSH_INTERVAL_S)
        except TimeoutError:
            raise EngineControlError(
                f"{self.base_url} did not flush within {timeout_s} s; it said: {last:.500}"
            ) from None

    async def abort(self, rid: str | None = None) -> None:
        """End requests by prefix of their id, or all."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def update_weights_from_disk(self, folder: str, version: int) -> None:
        """Let the engine install a Hugging Face folder as `version`."""
        await self._post(
            "/update_weights_from_disk",
            {"model_path": folder, "weight_version": str(version), "abort_all_requests": False},
        )

    async def set_version(self, version: int) -> None:
        """Label the weights. SGLang aborts all requests unless told not to; it is told."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def join_group(
        self, host: str, port: int, *, rank: int, world_size: int, name: str, backend: str = "gloo"
    ) -> None:
        """Let the engine join a broadcast group whose rank 0 sends weights."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def receive_bucket(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Let the engine receive one bucket, without a version label: that is set once all have arrived."""
        body = {
            "names": list(names),
            "dtypes": [dtype.removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "group_name": name,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._post("/update_weights_from_distributed", body)

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._checked(path, await self._send("POST", path, body))

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._client.request(
                method, self.base_url + path, json=body, headers=self._headers, timeout=self._timeout_s
            )
        except httpx.HTTPError as error:
            raise EngineControlError(
                f"{self.base_url}{path} did not answer: {type(error).__name__}: {error}"
            ) from error

    def _checked(self, path: str, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            answer = {}
        failed = response.status_code != httpx.codes.OK or (isinstance(answer, dict) and answer.get("success") is False)
        if failed or not isinstance(answer, dict):
            raise EngineControlError(
                f"{self.base_url}{path} answered {response.status_code}: {response.text:.500}",
                status=response.status_code,
            )
        return answer
