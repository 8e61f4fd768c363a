"""The agent of the calculator tasks. Apart from their graders, which run where `openai` need not be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI


class CalculatorAgent:
    """Plays one episode over a session URL with the `openai` client.

    `use_tool` gives the tool's answer to an assistant turn, or None when the turn is no valid call. The answer travels
    as a user turn. An episode ends after the turn that follows `max_calls` calls, or with a turn that is no call.
    """

    def __init__(self, use_tool: Callable[[str], str | None], *, max_calls: int = 1, timeout_s: float = 60.0) -> None:
        self._use_tool = use_tool
        self._max_calls = max_calls
        self._client = AsyncOpenAI(
            base_url="http://127.0.0.1/unset",
            api_key="session",
            max_retries=0,
            timeout=timeout_s,
        )

    async def __call__(
        self,
        base_url: str,
        prompt: Sequence[Mapping[str, Any]],
        request_kwargs: Mapping[str, Any],
        metadata: Mapping[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Ask, run the tool while it is called, take the answer. Returns the number of turns and tool calls."""
        chat = self._client.with_options(base_url=f"{base_url}/v1").chat.completions
        sampling = dict(request_kwargs)  # not only OpenAI's own names: they travel beside them in the body
        messages: list[Any] = [dict(message) for message in prompt]
        calls = 0
        while True:
            reply = await chat.create(model="policy", messages=messages, extra_body=sampling)
            said = reply.choices[0].message.content or ""
            result = None if reply.choices[0].finish_reason == "length" else self._use_tool(said)
            if result is None or calls == self._max_calls:
                return {"agent_metrics": {"turns": calls + 1, "tool_calls": calls}}
            calls += 1
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()
