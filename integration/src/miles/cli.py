"""The `miles` command."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

if TYPE_CHECKING:
    from miles.layers import Resolved, Setting

app = cyclopts.App(name="miles", help="Reinforcement-learning post-training that can be trusted token by token.")
config_app = cyclopts.App(name="config", help="Look at a configuration before a run.")
app.command(config_app)

RECIPES = Path(__file__).parent / "recipes"

Overrides = Annotated[
    str,
    Parameter(allow_leading_hyphen=True, help="options of the configuration, as --section.option VALUE"),
]


@app.command
def quickstart(
    *overrides: Overrides,
    tiny: bool = False,
    sync: bool = False,
    plain: bool = False,
    out: Path | None = None,
    seed: int | None = None,
    model: Path | None = None,
) -> int:
    """GRPO of a small real model on this machine's CPU, with live progress, then a report.

    Parameters
    ----------
    tiny
        The toy model, made and pre-trained here, in about a minute instead of about four.
    sync
        Generate, train and update in turn (staleness limit 0, admission control).
    plain
        Plain lines instead of the live panel.
    out
        Run folder; by default one below `runs/`.
    seed
        Seed of prompts and sampling.
    model
        A Hugging Face folder in place of the model; its chat family is --tito.family.name.
    """
    from miles.layers import Setting

    settings = [] if seed is None else [Setting(("loop", "seed"), seed, "--seed")]
    if model is not None:
        settings.append(Setting(("model", "path"), str(model), "--model"))
    if sync:
        settings += [
            Setting(("rollout", "buffer", "max_staleness"), 0, "--sync"),
            Setting(("rollout", "worker", "staleness_policy"), "admit", "--sync"),
        ]
    return _train([RECIPES / ("tiny.toml" if tiny else "quickstart.toml")], settings, overrides, out, plain)


@app.command
def train(*recipes_and_overrides: Overrides, plain: bool = False, out: Path | None = None) -> int:
    """Run a recipe: TOML files, left to right, then --section.option VALUE.

    Parameters
    ----------
    plain
        Plain lines instead of the live panel.
    out
        Run folder; by default one below `runs/`.
    """
    from miles.errors import ConfigError

    recipes, overrides = _split(recipes_and_overrides)
    if not recipes:
        raise ConfigError("give a recipe, for example: miles train recipe.toml --loop.steps 8")
    return _train(recipes, [], overrides, out, plain)


@app.command
def report(run: Path) -> int:
    """Write the report of a run again from what its folder holds."""
    from miles.errors import RunFolderError
    from miles.report import write_report
    from miles.run_folder import RunFolder

    folder = RunFolder(run)
    if not folder.metrics.exists():
        raise RunFolderError(f"{run} is no run folder: it has no metrics.jsonl")
    print(write_report(folder))
    return 0


@config_app.command
def show(*recipes_and_overrides: Overrides) -> int:
    """Print the whole configuration with the origin of each value that was set."""
    from miles.layers import to_toml

    print(to_toml(_resolved(*_split(recipes_and_overrides))), end="")
    return 0


@config_app.command
def check(*recipes_and_overrides: Overrides) -> int:
    """Say whether a configuration is valid."""
    _resolved(*_split(recipes_and_overrides))
    print("the configuration is valid")
    return 0


def _split(arguments: tuple[str, ...]) -> tuple[list[Path], tuple[str, ...]]:
    first_option = next((index for index, text in enumerate(arguments) if text.startswith("--")), len(arguments))
    return [Path(text) for text in arguments[:first_option]], arguments[first_option:]


def _resolved(recipes: list[Path], overrides: tuple[str, ...], settings: Sequence[Setting] = ()) -> Resolved:
    from miles.layers import from_arguments, from_environment, from_file, resolve

    layers = [setting for recipe in recipes for setting in from_file(recipe)]
    return resolve([*layers, *from_environment(os.environ), *settings, *from_arguments(overrides)])


def _train(
    recipes: list[Path], settings: Sequence[Setting], overrides: tuple[str, ...], out: Path | None, plain: bool
) -> int:
    resolved = _resolved(recipes, overrides, settings)
    from miles.run_folder import default_run_root

    root = out if out is not None else default_run_root(Path("runs"))
    try:
        print(asyncio.run(_run_until_stopped(resolved, root, plain)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return 0


async def _run_until_stopped(resolved: Resolved, root: Path, plain: bool) -> str:
    """Run, taking Ctrl-C: the first ends the run in order, the second cancels it."""
    from miles.run import run_training
    from miles.stopping import StopRequest, interruptible
    from miles.ui import choose_view

    view, stop = choose_view(plain=plain), StopRequest()
    with interruptible(stop, view.phase):
        return await run_training(resolved, root, view, stop)


def main() -> None:
    """Run the command; an error of ours is one message and a non-zero exit code."""
    from miles.wiring.errors import user_errors

    try:
        sys.exit(app())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except user_errors() as error:
        print(f"miles: {error}", file=sys.stderr)
        sys.exit(1)
