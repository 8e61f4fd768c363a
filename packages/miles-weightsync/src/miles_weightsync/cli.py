"""The command `miles-weightsync`: look at checkpoints as an update sees them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="miles-weightsync", help="Weight identity: manifests, comparisons and bucket plans of checkpoints.")


@app.command
def inspect(folder: Path, *, json: bool = False) -> int:
    """Print what a checkpoint folder holds, and the digest that is its identity.

    Parameters
    ----------
    folder
        A Hugging Face model folder with safetensors files.
    json
        Print the manifest (weight-manifest/v1) instead.
    """
    from miles_weightsync.checkpoint import checkpoint_manifest
    from miles_weightsync.manifest import dumps_manifest

    manifest = checkpoint_manifest(folder)
    if json:
        print(dumps_manifest(manifest).decode())
        return 0
    for record in manifest.tensors:
        print(f"{record.digest}  {record.dtype:8} {','.join(map(str, record.shape)) or '-':16} {record.name}")
    print(f"{len(manifest.tensors)} tensors, {manifest.nbytes} bytes, manifest {manifest.digest}")
    return 0


@app.command
def verify(first: Path, second: Path) -> int:
    """Compare the tensors of two checkpoint folders byte for byte; exit status 1 when they differ.

    Parameters
    ----------
    first
        A Hugging Face model folder.
    second
        Another one.
    """
    from miles_weightsync.checkpoint import checkpoint_manifest
    from miles_weightsync.manifest import diff_manifests

    base, new = checkpoint_manifest(first), checkpoint_manifest(second)
    diff = diff_manifests(base, new)
    for kind in ("missing", "extra", "meta", "bytes"):
        for name in getattr(diff, kind):
            print(f"{kind:8} {name}")
    print(f"{len(base.tensors)} and {len(new.tensors)} tensors, {len(diff.names)} differ")
    return 0 if diff.equal else 1


@app.command
def plan(
    folder: Path, *, bucket_bytes: Annotated[int, Parameter(help="Capacity of a bucket in bytes.")] = 512 * 1024 * 1024
) -> int:
    """Print the buckets in which a checkpoint would travel.

    Parameters
    ----------
    folder
        A Hugging Face model folder.
    """
    from miles_weightsync.bucket import BucketItem, plan_buckets
    from miles_weightsync.checkpoint import list_tensors
    from miles_weightsync.config import UnitsConfig
    from miles_weightsync.names import phase_of
    from miles_weightsync.units import form_units

    tensors, units = list_tensors(folder), UnitsConfig()
    groups = form_units([tensor.name for tensor in tensors], units.rules, units.companions)
    unit_of = {index: str(number) for number, group in enumerate(groups) for index in group}
    items = [BucketItem(tensor.name, tensor.nbytes, unit_of[i]) for i, tensor in enumerate(tensors)]
    for number, bucket in enumerate(plan_buckets(items, bucket_bytes, order="canonical")):
        nbytes = sum(items[index].nbytes for index in bucket)
        first, last = items[bucket[0]].name, items[bucket[-1]].name
        print(f"{number:5} {phase_of(first):10} {len(bucket):6} tensors {nbytes:14} bytes  {first} … {last}")
    return 0


def main() -> None:
    """Run the command. An error of the input is one line on stderr and exit status 2."""
    from miles_weightsync.errors import WeightSyncError

    try:
        sys.exit(app())
    except WeightSyncError as error:
        print(f"miles-weightsync: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
