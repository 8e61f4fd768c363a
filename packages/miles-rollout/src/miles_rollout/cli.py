"""The command `miles-rollout`: each role alone, and what became of a run's prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from pydantic import ValidationError

from miles_rollout.config import RouterConfig
from miles_rollout.errors import RolloutConfigError, RolloutError
from miles_rollout.events import read_events
from miles_rollout.history import History, check_history, prompt_story
from miles_rollout.local.config import EngineServerConfig

app = App(name="miles-rollout", help="Engines, router and the story of a run's prompts.", version="0.1.0")

Token = Annotated[str | None, Parameter(env_var="MILES_CONTROL_TOKEN", help="bearer token that control routes ask for")]


@app.command
def serve_engine(config: Annotated[EngineServerConfig, Parameter(name="*")]) -> None:
    """Serve one local engine behind SGLang's HTTP API; one JSON line on standard output says where."""
    try:
        from miles_rollout.server.run import serve_engine as serve
    except ModuleNotFoundError as error:
        raise RolloutConfigError(
            f"the local engine needs {error.name}, which is not installed: pip install 'miles-rollout[local]'"
        ) from error
    serve(config)


@app.command
def serve_router(
    config: Annotated[RouterConfig | None, Parameter(name="*")] = None, *, control_token: Token = None
) -> None:
    """Serve the router; one JSON line on standard output says where."""
    from miles_rollout.router.run import run_router

    run_router(config or RouterConfig(), control_token=control_token)


@app.command
def why(run: Path, *, prompt: str | None = None, max_staleness: int | None = None, finished: bool = False) -> int:
    """Tell what became of every drawn prompt of RUN (a run folder or its events.jsonl), and check that it adds up.

    Args:
        run: the folder or file.
        prompt: tell the whole story of this prompt id instead of one line a prompt.
        max_staleness: the limit to check against; by default the one in the events.
        finished: the run is over, so a prompt without an outcome is a fault.
    """
    events = list(read_events(run))
    history = check_history(events, max_staleness=max_staleness, finished=finished)
    for key, lines in prompt_story(events).items():
        if prompt is None:
            print(f"{key}: {lines[-1]} (after {len(lines)} events)")
        elif key.prompt_id == prompt:
            print("\n  ".join([f"{key}", *lines]))
    _print_summary(history)
    return 0 if history.sound else 1


def _print_summary(history: History) -> None:
    counts = {**history.outcomes, "open": len(history.open_prompts)}
    print(f"{history.drawn} prompts drawn: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    for reason, count in sorted(history.drop_reasons.items()):
        print(f"{count} groups dropped: {reason}")
    print(f"{history.retries} groups tried again; oldest trained token: {_versions(history.max_trained_staleness)}")
    for fault in history.faults:
        print(f"FAULT: {fault}")


def _versions(staleness: int | None) -> str:
    return "unknown" if staleness is None else f"{staleness} versions old"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. An error of ours is one line on standard error and exit code 1."""
    try:
        result = app(None if arguments is None else list(arguments))
    except RolloutError as error:
        print(f"miles-rollout: {error}", file=sys.stderr)
        sys.exit(1)
    except ValidationError as error:
        for fault in error.errors():
            print(f"miles-rollout: {'.'.join(map(str, fault['loc']))}: {fault['msg']}", file=sys.stderr)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


__all__ = ["app", "main"]
