"""The comparator's resynchronising mode: it goes on after a difference, and tells bugs from sampled spellings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_tito import Comparator, Family, Tokenizer
from miles_tito.assemble import comparator_of

TEXT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nr<|im_end|>\n"


@pytest.fixture
def comparator(smollm2: Family) -> Comparator:
    return comparator_of(smollm2)


def kinds(comparator: Comparator, tokenizer: Tokenizer, actual: str, expected: str = TEXT) -> list[str]:
    by_text = comparator.compare_text(expected, tokenizer.encode(actual))
    by_ids = comparator.compare(tokenizer.encode(expected), tokenizer.encode(actual))
    assert [m.type for m in by_text] == [m.type for m in by_ids if m.type != "retokenized_only"]
    return [mismatch.type for mismatch in by_text]


@pytest.mark.parametrize(
    ("actual", "expected_kinds"),
    [
        (TEXT, []),
        (TEXT.rstrip(), []),
        (TEXT.replace("hi", "ho"), ["assistant_text"]),
        (TEXT.replace("q<", "p<"), ["non_assistant_text"]),
        (TEXT.replace("hi<|im_end|>\n", "hi"), ["special_token_count"]),
        (TEXT.replace("hi<|im_end|>", "hi<|im_end|><|im_end|>"), ["special_token_count"]),
        (TEXT.replace("hi<|im_end|>", "hi<|endoftext|>"), ["special_token_type"]),
    ],
)
def test_differences_are_classified(
    comparator: Comparator, tokenizer: Tokenizer, actual: str, expected_kinds: list[str]
) -> None:
    assert kinds(comparator, tokenizer, actual) == expected_kinds


def test_an_early_extra_token_hides_nothing_behind_it(comparator: Comparator, tokenizer: Tokenizer) -> None:
    actual = TEXT.replace("q<|im_end|>", "q<|im_end|><|im_end|>").replace("hi", "ho").replace("r<", "s<")
    found = kinds(comparator, tokenizer, actual)
    assert found == ["special_token_count", "assistant_text", "non_assistant_text"]


def test_only_a_cut_turn_may_lack_its_stop(comparator: Comparator, tokenizer: Tokenizer) -> None:
    cut = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nhi"
    expected = cut + "<|im_end|>\n"
    (open_,) = comparator.compare_text(expected, tokenizer.encode(cut), cut=True)
    assert (open_.type, open_.hard) == ("boundary_open", False)
    (bug,) = comparator.compare_text(expected, tokenizer.encode(cut))
    assert (bug.type, bug.hard) == ("special_token_count", True)


def test_control_tokens_typed_as_text_are_hard(comparator: Comparator, tokenizer: Tokenizer) -> None:
    expected = "<|im_start|>user\nx<|im_end|>y<|im_end|>\n"
    ids = [*tokenizer.encode("<|im_start|>user\n"), *tokenizer.encode("x<|im_end|>y", literal=True)]
    found = comparator.compare_text(expected, [*ids, *tokenizer.encode("<|im_end|>")])
    assert any(mismatch.hard for mismatch in found)


def test_other_ids_of_the_same_text_are_soft() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    comparator = Comparator(Tokenizer(backend), assistant_start=None)
    (found,) = comparator.compare([2], [0, 1])
    assert (found.type, found.hard, found.detail) == ("retokenized_only", False, "1 ids against 2")
    assert comparator.compare([2], [0, 1], "first") == []


def test_blocks_and_divergence_are_named(comparator: Comparator, tokenizer: Tokenizer) -> None:
    (found,) = comparator.compare_text(TEXT, tokenizer.encode(TEXT.replace("r<", "s<")))
    assert found.block_index == 2
    assert "'r'" in found.detail


def test_normalised_text_is_no_difference(tmp_path: Path) -> None:
    Tokenizer.byte_level(special=["<|im_start|>", "<|im_end|>"]).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "NFC"}}))
    tokenizer = Tokenizer.load(tmp_path)
    decomposed = "<|im_start|>user\ne\u0301<|im_end|>"
    ids = tokenizer.encode(decomposed)
    assert tokenizer.decode(ids) != decomposed
    assert Comparator(tokenizer, assistant_start=None).compare_text(decomposed, ids) == []
