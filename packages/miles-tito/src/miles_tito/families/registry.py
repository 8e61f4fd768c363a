"""The families that are built."""

from __future__ import annotations

from collections.abc import Callable

from miles_tito.errors import ConfigurationError
from miles_tito.tokenizer import Tokenizer

from .base import Family, FamilyOptions
from .default import Default
from .qwen3 import Qwen3
from .smollm2 import SmolLM2

_FAMILIES: dict[str, Callable[[Tokenizer, FamilyOptions | None], Family]] = {
    "qwen3": Qwen3,
    "smollm2": SmolLM2,
    "default": Default,
}


def family_names() -> tuple[str, ...]:
    """Names that `load_family` takes."""
    return tuple(_FAMILIES)


def load_family(name: str, tokenizer: Tokenizer, options: FamilyOptions | None = None) -> Family:
    """Bind the family `name` to `tokenizer`.

    Raises `ConfigurationError` for an unknown name or impossible options, `TokenizerError` when the tokenizer lacks
    one of the family's structural tokens or splits it.
    """
    if name not in _FAMILIES:
        raise ConfigurationError(f"no chat family {name!r}: choose one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name](tokenizer, options)
