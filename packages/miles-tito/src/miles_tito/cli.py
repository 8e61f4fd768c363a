"""The command `miles-tito`. Heavy imports happen inside the commands, so that `--help` is fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

app = App(name="miles-tito", help="Token identity for RL: sessions that keep the exact sampled ids.")
tokenizers_app = App(name="tokenizers", help="Real tokenizers for the golden vectors.")
app.command(tokenizers_app)


@app.command
def serve(
    *,
    engine: str,
    tokenizer: Path,
    family: str,
    host: str = "127.0.0.1",
    port: int = 0,
    matcher: Literal["strict", "loose_tool_call", "role_content_only"] = "strict",
    on_truncation: Literal["refuse", "close"] = "refuse",
    record_experts: bool = False,
    max_context_tokens: int | None = None,
    default_system: str | None = None,
    tito_allowed_append_roles: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
) -> None:
    """Serve sessions over an engine.

    Tokens come from the environment: MILES_ENGINE_TOKEN for the engine, MILES_CONTROL_TOKEN for the control route.

    Parameters
    ----------
    engine
        Base URL of an engine or router that speaks SGLang's native API.
    tokenizer
        Hugging Face folder that holds a tokenizer.json.
    family
        Chat family; `miles-tito families` lists them.
    host
        Address to listen on.
    port
        Port to listen on; 0 takes a free one and prints it.
    matcher
        When a replayed message is taken for the stored one.
    on_truncation
        What to do with a request that extends a truncated turn.
    record_experts
        Keep the routed experts of every token.
    max_context_tokens
        Longest prompt plus answer.
    default_system
        System turn of conversations that bring none.
    tito_allowed_append_roles
        Narrow the roles that may follow a generated turn.
    """
    from .config import EngineConfig, FamilyConfig, ServerConfig, SessionConfig, TitoConfig
    from .serve import serve as run

    run(
        TitoConfig(
            server=ServerConfig(host=host, port=port),
            session=SessionConfig(
                matcher=matcher,
                on_truncation=on_truncation,
                record_experts=record_experts,
                max_context_tokens=max_context_tokens,
            ),
            family=FamilyConfig(
                name=family,
                default_system=default_system,
                append_roles=tuple(tito_allowed_append_roles) if tito_allowed_append_roles else None,
            ),
            engine=EngineConfig(url=engine),
            tokenizer=tokenizer,
        ),
        engine_token=os.environ.get("MILES_ENGINE_TOKEN"),
        control_token=os.environ.get("MILES_CONTROL_TOKEN"),
        announce=lambda real: print(f"miles-tito listening on http://{host}:{real}", flush=True),
    )


@app.command
def families() -> None:
    """List the chat families that are built."""
    from .families import family_names

    for name in family_names():
        print(name)


@app.command
def view(file: Path, *, tokenizer: Path | None = None) -> None:
    """Print a trajectory token by token.

    Parameters
    ----------
    file
        A trajectory v1 file.
    tokenizer
        Folder with the tokenizer.json of the model; without it ids are shown as numbers.
    """
    from .view import view_trajectory

    for line in view_trajectory(file, tokenizer):
        print(line)


@tokenizers_app.command
def fetch(*names: str, folder: Path | None = None) -> None:
    """Fetch tokenizers with the ordinary package clients; all there are when none is named.

    Parameters
    ----------
    names
        Tokenizers to fetch.
    folder
        Where to put them; by default the cache.
    """
    from .fetch import SOURCES, fetch_tokenizer

    for name in names or tuple(SOURCES):
        print(f"{name}: {fetch_tokenizer(name, folder)}")


def main() -> None:
    """Run the command line. An error of ours is one line and exit code 1."""
    from .errors import TitoError

    try:
        app()
    except TitoError as error:
        print(f"miles-tito: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
