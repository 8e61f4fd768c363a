"""Agents are user code: loading them, and what they are given.

An agent is `async run(base_url, prompt, request_kwargs, metadata) -> dict | None`. It posts OpenAI chat requests to
`base_url + "/v1/chat/completions"`; the session server records the tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from miles_rollout.data.prompts import Prompt
from miles_rollout.errors import PluginError
from miles_rollout.plugins import check_signature, load_function
from miles_rollout.protocols import Agent, SessionHandle

AGENT_PARAMETERS = ("base_url", "prompt", "request_kwargs", "metadata")
_CHAT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_CHAT_KEYS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "max_completion_tokens"),
        *("seed", "n", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("reasoning_effort", "chat_template_kwargs", "tool_choice", "parallel_tool_calls", "response_format"),
    }
)


def load_agent(path: str) -> Agent:
    """The agent at `package.module:function` or behind an entry point of `miles.agents`. Raises PluginError."""
    agent = load_function(path, AGENT_PARAMETERS, kind="agent")
    return check_agent(agent, name=path)


def check_agent(agent: Any, *, name: str = "agent") -> Agent:
    """Return the agent if it is an async callable of the four parameters, else raise PluginError."""
    check_signature(agent, AGENT_PARAMETERS, name=name, kind="agent")
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__)):
        raise PluginError(f"{name} is not async: an agent is `async def run({', '.join(AGENT_PARAMETERS)})`")
    checked: Agent = agent
    return checked


def chat_request_kwargs(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings in the names of chat completions.

    An explicit chat name wins over the engine's name for it; unknown keys and nulls are dropped, and `model` and
    `messages` are never passed.
    """
    renamed = {_CHAT_NAMES[key]: value for key, value in sampling.items() if key in _CHAT_NAMES and value is not None}
    explicit = {key: value for key, value in sampling.items() if key in _CHAT_KEYS and value is not None}
    return renamed | explicit


def agent_metadata(prompt: Prompt, handle: SessionHandle, max_seq_len: int | None) -> dict[str, Any]:
    """The prompt's metadata, `max_seq_len` when set, and `session_server_id`: host and port of the session's owner."""
    limit = {} if max_seq_len is None else {"max_seq_len": max_seq_len}
    return {**prompt.metadata, **limit, "session_server_id": urlsplit(handle.base_url).netloc}
