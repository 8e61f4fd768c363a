"""The session server: OpenAI chat completions in, exact token ids kept."""

from .app import create_app
from .run import run_server

__all__ = ["create_app", "run_server"]
