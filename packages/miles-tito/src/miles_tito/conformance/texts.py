"""Vectors that need no real tokenizer: renderings, splices as text, matchers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_tito.families import Family
from miles_tito.matching import MATCHERS
from miles_tito.messages import normalize_messages

from .found import Case, NotBuiltError, Tokenizers, WrongError, expect_equal, text_family
from .replay import spliced_ids


def case_kwargs(case: Case) -> dict[str, Any]:
    """Template variables of a case: the family's constants and the caller's."""
    return {**case["family_kwargs"], **case["kwargs"]}


def check_render(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """`rendered` is the text of the conversation; with `prefix_stable`, each assistant-terminated prefix is a prefix
    of it."""
    if "family" not in case:
        raise NotBuiltError(f"files called {path.name}")
    family = text_family(case["family"])
    messages, tools, kwargs = normalize_messages(case["messages"]), case["tools"], case_kwargs(case)
    text = family.render(messages, tools, kwargs, add_generation_prompt=case["add_generation_prompt"])
    expect_equal("rendered", text, case["rendered"])
    if case.get("prefix_stable"):
        _expect_prefixes(family, messages, tools, kwargs, text)


def _expect_prefixes(family: Family, messages: tuple[Any, ...], tools: Any, kwargs: Any, text: str) -> None:
    for end, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        if not text.startswith(family.render(messages[:end], tools, kwargs, add_generation_prompt=False)):
            raise WrongError(f"the rendering of the first {end} messages is no prefix of the whole")


def check_splice(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """Prompt and sample as stored ids, then the appended messages: the next prompt, as text."""
    family = text_family(case["family"])
    encode = family.tokenizer.encode
    expect_equal("stored_text", case["prompt_text"] + case["sampled_text"], case["stored_text"])
    spliced = spliced_ids(family, case, encode(case["sampled_text"]))
    expect_equal("prompt_text", family.tokenizer.decode(spliced.prompt_ids), case["prompt_text"])
    expect_equal("next prompt", family.tokenizer.decode(spliced.next_ids), case["expected_next_prompt"])


def check_matcher(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """Each matcher's verdict on a stored and a replayed message."""
    for name, matcher in MATCHERS.items():
        expect_equal(name, matcher(case["stored"], case["replayed"]), case[name])
