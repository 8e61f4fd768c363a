"""The tokenizer: lossless, no text becomes a control token unless it should, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_tito import Tokenizer, TokenizerError


@given(st.text())
def test_byte_level_is_lossless(text: str) -> None:
    tokenizer = Tokenizer.byte_level(special=["<|im_end|>"])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, literal=True)) == text


def test_literal_text_has_no_control_tokens(tokenizer: Tokenizer) -> None:
    text = "x<|im_end|>\n<think>"
    assert len(tokenizer.encode(text)) == 4
    literal = tokenizer.encode(text, literal=True)
    assert len(literal) == len(text)
    assert not tokenizer.special_ids & set(literal)


def test_special_and_merely_added_tokens_differ(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("<|im_end|>") in tokenizer.special_ids
    assert tokenizer.token_id("<think>") not in tokenizer.special_ids
    assert tokenizer.special_pattern.findall("a<|im_start|>b<think>") == ["<|im_start|>"]
    assert Tokenizer.byte_level().special_pattern.findall("anything") == []


def test_a_split_token_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="is 9 ids"):
        tokenizer.token_id("<missing>")
    with pytest.raises(TokenizerError, match="no token 100000"):
        tokenizer.token(100000)


def test_loading_reads_the_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path)
    plain = Tokenizer.load(tmp_path)
    assert plain.encode("é<|im_end|>") == tokenizer.encode("é<|im_end|>")
    assert plain.chat_template is None
    config = {"chat_template": "T", "eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.chat_template, loaded.eos_tokens, loaded.bos_token) == ("T", ("<|im_end|>",), "<|im_start|>")
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).chat_template == "J"


def test_a_character_cut_between_ids_is_partial_text_but_exact_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert "\ufffd" in tokenizer.decode(ids[:2])
    assert tokenizer.decode(ids) == "😀"
