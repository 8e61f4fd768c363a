"""Client of the session server, as a rollout worker needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from .codec import loads_batch
from .errors import IDENTITY_ERRORS, ServerError
from .trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """An open session. Agents speak OpenAI chat to `base_url` + "/v1"."""

    session_id: str
    base_url: str


class SessionServerClient:
    """Opens, collects and deletes sessions. An identity violation on the server is raised here as the same class."""

    def __init__(
        self,
        base_url: str,
        *,
        control_token: str | None = None,
        timeout_s: float = 120.0,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._control = {"authorization": f"Bearer {control_token}"} if control_token else {}
        self._client = client or httpx.AsyncClient(timeout=timeout_s, trust_env=False)

    async def create(
        self,
        *,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SessionHandle:
        """Open a session; turn t of it samples with `derive_seed(seed, t)`."""
        body = {"seed": seed, "sampling": dict(sampling or {}), "metadata": dict(metadata or {})}
        answer = await self._call("POST", "/sessions", body)
        session_id = str(answer.json()["session_id"])
        return SessionHandle(session_id, f"{self.base_url}/sessions/{session_id}")

    async def collect(self, session_id: str, *, max_seq_len: int | None = None) -> list[Trajectory]:
        """The trajectories of a session, one a path; empty when nothing was generated. Raises an
        `IdentityViolation`."""
        body = {} if max_seq_len is None else {"max_seq_len": max_seq_len}
        answer = await self._call("POST", f"/sessions/{session_id}/samples", body)
        return list(loads_batch(answer.content).trajectories)

    async def delete(self, session_id: str) -> None:
        """Close a session. One that is already gone is no error."""
        try:
            await self._call("DELETE", f"/sessions/{session_id}")
        except ServerError as error:
            if error.status != 404:
                raise

    async def set_versions(self, begun: int, acknowledged: Mapping[str, int]) -> None:
        """Tell the server which weight versions replies may name."""
        await self._call(
            "POST", "/control/versions", {"begun": begun, "acknowledged": dict(acknowledged)}, self._control
        )

    async def health(self) -> bool:
        """Whether the server answers."""
        try:
            return (await self._call("GET", "/health")).status_code == 200
        except ServerError:
            return False

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        url = f"{self.base_url}{path}"
        try:
            answer = await self._client.request(method, url, json=body, headers=dict(headers or {}))
        except httpx.TransportError as error:
            raise ServerError(
                f"{url}: {type(error).__name__}: {error}; is the session server running?",
                status=0,
                code="server_unreachable",
            ) from error
        if answer.status_code >= 400:
            raise _error_of(url, answer)
        return answer


def _error_of(url: str, answer: httpx.Response) -> Exception:
    try:
        body = answer.json()
    except ValueError:
        body = None
    problem: Mapping[str, Any] = body if isinstance(body, dict) else {}
    code, detail = problem.get("code"), str(problem.get("detail", answer.text[:500]))
    if isinstance(code, str) and code in IDENTITY_ERRORS:
        return IDENTITY_ERRORS[code](detail)
    return ServerError(f"{url} answered {answer.status_code}: {detail}", status=answer.status_code, code=code)
