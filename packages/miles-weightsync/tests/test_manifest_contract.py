"""contracts/weight-manifest/v1: what we write is what the contract says, and what breaks it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from miles_weightsync import (
    Manifest,
    RawTensor,
    TensorError,
    WeightSyncError,
    dumps_manifest,
    loads_manifest,
    manifest_of,
)
from miles_weightsync.manifest import manifest_to_json


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def manifest(contract: Path) -> Manifest:
    tensors = [
        (t["name"], RawTensor(t["dtype"], tuple(t["shape"]), memoryview(bytes.fromhex(t["hex"]))))
        for t in _load(contract / "golden" / "tensors.json")
    ]
    return manifest_of(7, tensors)


def test_the_golden_tensors_make_the_golden_manifest(contract: Path, manifest: Manifest) -> None:
    assert manifest_to_json(manifest) == _load(contract / "golden" / "manifest.json")


def test_what_we_write_follows_the_schema(contract: Path, manifest: Manifest) -> None:
    schema = _load(contract / "schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(dumps_manifest(manifest)), schema)


def test_a_manifest_reads_back_equal(manifest: Manifest) -> None:
    again = loads_manifest(dumps_manifest(manifest))
    assert again == manifest
    assert again.digest == manifest.digest


def test_a_base_is_kept(manifest: Manifest) -> None:
    based = Manifest(7, manifest.tensors, base=6)
    assert loads_manifest(dumps_manifest(based)).base == 6
    assert based.digest == manifest.digest, "the identity is that of the bytes"


def test_broken_documents_are_refused(contract: Path) -> None:
    for case in _load(contract / "golden" / "broken.json"):
        text = json.dumps(case["document"])
        with pytest.raises(WeightSyncError):
            loads_manifest(text)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1, "schema": 2}', "{" * 100_000, '{"tensors": NaN}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(TensorError):
        loads_manifest(text)
