"""The agent of `miles.tasks.tool_sum`. Apart from the grader, which runs where `openai` need not be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from miles.tasks.tool_sum import calculate


class ToolSumAgent:
    """Plays one episode over a session URL with the `openai` client."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
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
        """Ask, run the tool, ask again. Returns the number of turns and tool calls."""
        chat = self._client.with_options(base_url=f"{base_url}/v1").chat.completions
        sampling = dict(request_kwargs)  # not only OpenAI's own names: they travel beside them in the body
        messages: list[Any] = [dict(message) for message in prompt]
        reply = await chat.create(model="policy", messages=messages, extra_body=sampling)
        call = reply.choices[0].message.content or ""
        result = calculate(call)
        if result is None or reply.choices[0].finish_reason == "length":
            return {"agent_metrics": {"turns": 1, "tool_calls": 0}}
        messages += [{"role": "assistant", "content": call}, {"role": "user", "content": result}]
        await chat.create(model="policy", messages=messages, extra_body=sampling)
        return {"agent_metrics": {"turns": 2, "tool_calls": 1}}

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()
