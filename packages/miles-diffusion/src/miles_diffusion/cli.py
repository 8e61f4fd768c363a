"""The command `miles-diffusion`."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Annotated

from cyclopts import App, Parameter

from miles_diffusion.errors import DiffusionError

app = App(
    name="miles-diffusion",
    help="Reinforcement learning for diffusion and flow-matching models.",
    version_flags=["--version"],
)


@app.command
def sigmas(
    num_steps: int,
    *,
    shift: Annotated[float, Parameter(help="Shift of the grid towards noise; 1 leaves it even.")] = 3.0,
) -> None:
    """Print the sigma schedule: one line a step, its sigma and its length, then the terminal 0.

    Parameters
    ----------
    num_steps
        Denoising steps.
    """
    import torch

    from miles_diffusion.schedules import shifted_sigmas

    grid = shifted_sigmas(num_steps, shift, dtype=torch.float64).tolist()
    for step, (sigma, following) in enumerate(pairwise(grid)):
        print(f"{step:4d}  sigma {sigma:.9f}  dt {following - sigma:+.9f}")
    print(f" end  sigma {grid[-1]:.9f}")


def main() -> None:
    """Run the command line; a wrong input ends it with one message and exit code 2."""
    try:
        app()
    except DiffusionError as error:
        print(f"miles-diffusion: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
