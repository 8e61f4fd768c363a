"""What the checks share: cases, tokenizers by name, and the two ways to fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_tito.errors import TokenizerError
from miles_tito.families import Family, family_names, load_family
from miles_tito.tokenizer import Tokenizer

Case = Mapping[str, Any]
_STRUCTURAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class WrongError(Exception):
    """A computed value differs from the golden one."""


class NotBuiltError(Exception):
    """The case needs something that does not exist here yet."""


class Tokenizers:
    """Real tokenizers in a folder, each loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[str, Tokenizer] = {}

    def get(self, name: str) -> Tokenizer:
        """Tokenizer `name`. Raises `TokenizerError` when it is absent, which fails the case."""
        if name not in self._loaded:
            path = self.folder / name
            if not (path / "tokenizer.json").is_file():
                raise TokenizerError(f"no tokenizer in {path}: run `miles-tito tokenizers fetch`")
            self._loaded[name] = Tokenizer.load(path)
        return self._loaded[name]


def text_family(name: str) -> Family:
    """Family `name` over a byte-level tokenizer, which is lossless, for vectors that are text."""
    return _bind(name, _byte_tokenizer())


def real_family(name: str, tokenizers: Tokenizers) -> Family:
    """Family `name` over its real tokenizer."""
    require_built(name)
    return _bind(name, tokenizers.get(name))


def require_built(name: str) -> None:
    """Raise `NotBuiltError` when there is no such family."""
    if name not in family_names():
        raise NotBuiltError(f"family {name}")


@cache
def _byte_tokenizer() -> Tokenizer:
    return Tokenizer.byte_level(special=_STRUCTURAL, added=_MARKERS)


@cache
def _bind(name: str, tokenizer: Tokenizer) -> Family:
    require_built(name)
    return load_family(name, tokenizer)


@cache
def partners(path: Path) -> dict[str, Case]:
    """Cases of a partner file by id. Raises `WrongError` when there is no such file."""
    if not path.is_file():
        raise WrongError(f"the partner file {path.name} is missing beside this one")
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {case["id"]: case for case in cases}


def expect_equal(what: str, found: Any, expected: Any) -> None:
    """Raise `WrongError` that shows the first difference."""
    if found == expected:
        return
    if isinstance(found, str | list) and isinstance(expected, str | list):
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        at = min(len(found), len(expected)) if at is None else at
        window = slice(max(0, at - 10), at + 30)
        raise WrongError(f"{what} differs at {at}: got {found[window]!r}, expected {expected[window]!r}")
    raise WrongError(f"{what}: got {found!r}, expected {expected!r}")
