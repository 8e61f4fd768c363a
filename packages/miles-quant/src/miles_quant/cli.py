"""The command `miles-quant`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from miles_quant.errors import QuantError

app = App(name="miles-quant", help="Bit-exact low-precision formats: look at checkpoints.", version_flags=["--version"])


@app.command
def inspect(
    folder: Path,
    *,
    exclude: Annotated[
        list[str] | None, Parameter(help="Name segment that keeps a tensor as it is; repeatable.")
    ] = None,
    bf16_layers: Annotated[list[int] | None, Parameter(help="Layer index that stays as it is; repeatable.")] = None,
) -> None:
    """List the tensors of a checkpoint: dtype, shape, largest magnitude, and whether FP8 blocks would quantise them.

    Parameters
    ----------
    folder
        Folder of a Hugging Face checkpoint with *.safetensors files.
    """
    from miles_quant.inspection import inspect_folder
    from miles_quant.recipes import Fp8BlockRecipe

    recipe = Fp8BlockRecipe(bf16_layers=frozenset(bf16_layers or ()), exclude=frozenset(exclude or ()))
    count = selected = 0
    for report in inspect_folder(folder, recipe):
        verdict = "quantise" if report.kept is None else f"keep ({report.kept})"
        shape = "x".join(map(str, report.shape)) or "scalar"
        print(f"{report.name}  {report.dtype}  {shape}  max {report.max_abs:.6g}  {verdict}")
        count += 1
        selected += report.kept is None
    print(f"{count} tensors, {selected} would be quantised to FP8 blocks")


def main() -> None:
    """Run the command line; a wrong input ends it with one message and exit code 2."""
    try:
        app()
    except QuantError as error:
        print(f"miles-quant: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
