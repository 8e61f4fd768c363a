"""Families: append-only by construction, stop tokens resolved at load, roles narrowed but never widened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_tito import (
    ConfigurationError,
    Family,
    FamilyOptions,
    HistoryError,
    RequestError,
    Tokenizer,
    TokenizerError,
    family_names,
    load_family,
)
from miles_tito.messages import normalize_messages
from miles_tito.splice import StoredTurn, first_prompt_ids, next_prompt_suffix

SPECIAL = ["<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
BYTES = Tokenizer.byte_level(special=SPECIAL, added=MARKERS)
# Text without control tokens: those are the subject of the golden vectors.
Text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<" not in text)
Arguments = st.dictionaries(Text, st.none() | st.booleans() | st.integers() | Text, max_size=2).map(json.dumps)


@st.composite
def assistant(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | Text)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(Text)
    calls = draw(st.lists(Arguments, max_size=2))
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": call}}
            for i, call in enumerate(calls)
        ]
    return message


def plain(roles: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"role": st.sampled_from(roles), "content": Text})


Tools = st.none() | st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
QwenChat = st.lists(plain(["user", "system", "tool"]) | assistant(), min_size=1, max_size=6)
SmolChat = st.lists(plain(["user", "assistant"]), min_size=1, max_size=6)


def assert_append_only(family: Family, messages: list[dict[str, Any]], tools: Any) -> None:
    """Every assistant-terminated prefix is a prefix, and the suffix by itself is the difference of two renderings."""
    stored = normalize_messages(messages)
    whole = family.render(stored, tools, add_generation_prompt=True)
    for end, message in enumerate(stored, 1):
        if message["role"] == "assistant":
            prefix = family.render(stored[:end], tools, add_generation_prompt=False)
            assert whole.startswith(prefix)
            assert prefix + family.suffix_text(stored[:end], stored[end:], tools, {}) == whole


@settings(max_examples=80, deadline=None)
@given(QwenChat, Tools)
def test_qwen3_is_append_only(messages: list[dict[str, Any]], tools: Any) -> None:
    assert_append_only(load_family("qwen3", BYTES), messages, tools)


@settings(max_examples=60, deadline=None)
@given(SmolChat, st.none() | Text)
def test_smollm2_is_append_only(messages: list[dict[str, Any]], system: str | None) -> None:
    assert_append_only(load_family("smollm2", BYTES, FamilyOptions(default_system=system)), messages, None)


@settings(max_examples=60, deadline=None)
@given(QwenChat, st.lists(plain(["user", "tool"]), max_size=3), st.lists(st.integers(0, 255), max_size=8))
def test_the_next_prompt_holds_the_sampled_ids_and_the_rendered_suffix(
    messages: list[dict[str, Any]], appended: list[dict[str, Any]], sampled: list[int]
) -> None:
    family = load_family("qwen3", BYTES)
    stop = BYTES.token_id("<|im_end|>")
    stored, more = normalize_messages([*messages, {"role": "assistant", "content": "x"}]), appended
    prompt = first_prompt_ids(family, stored[:-1], None, {})
    suffix = next_prompt_suffix(family, StoredTurn([*sampled, stop]), stored, more, None, {})
    tail = family.render([*stored, *more], add_generation_prompt=True)
    head = family.render(stored, add_generation_prompt=False)
    assert BYTES.decode(suffix) == "\n" + tail[len(head) :]
    assert [*prompt, *sampled, stop, *suffix][len(prompt) : len(prompt) + len(sampled)] == sampled


def test_smollm2_writes_plain_chatml(smollm2: Family) -> None:
    messages = normalize_messages([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    text = smollm2.render(messages, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_the_default_system_turn_is_an_option_of_smollm2() -> None:
    # As the template in the metadata of the released GGUF does when a conversation brings no system turn.
    family = load_family("smollm2", BYTES, FamilyOptions(default_system="You help."))
    user = normalize_messages([{"role": "user", "content": "q"}])
    assert family.render(user, add_generation_prompt=False).startswith("<|im_start|>system\nYou help.<|im_end|>\n")
    own = normalize_messages([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    assert "You help." not in family.render(own, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "tool", "content": "x"}, "unsupported_role"),
        ({"role": "system", "content": "x"}, "system_not_first"),
    ],
)
def test_smollm2_refuses_what_it_cannot_write(smollm2: Family, message: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        smollm2.check(normalize_messages([{"role": "user", "content": "q"}, message]), None)
    assert (caught.value.code, caught.value.message_index) == (code, 1)
    with pytest.raises(RequestError, match="no way to declare tools"):
        smollm2.check(normalize_messages([{"role": "user", "content": "q"}]), [{"type": "function"}])


def test_template_variables_are_known_or_refused(qwen3: Family, smollm2: Family) -> None:
    assert qwen3.merge_kwargs({"enable_thinking": False, "clear_thinking": False})["enable_thinking"] is False
    with pytest.raises(RequestError) as conflict:
        qwen3.merge_kwargs({"clear_thinking": True})
    assert conflict.value.code == "conflicting_template_kwarg"
    with pytest.raises(RequestError) as unknown:
        smollm2.merge_kwargs({"enable_thinking": False})
    assert unknown.value.code == "unknown_template_kwarg"


def test_roles_can_be_narrowed_only(tokenizer: Tokenizer) -> None:
    narrowed = load_family("qwen3", tokenizer, FamilyOptions(append_roles=frozenset({"tool"})))
    with pytest.raises(RequestError) as caught:
        narrowed.check_appended(normalize_messages([{"role": "user", "content": "q"}]), 4)
    assert (caught.value.code, caught.value.message_index) == ("role_not_appendable", 4)
    with pytest.raises(ConfigurationError, match="cannot append tool"):
        load_family("smollm2", tokenizer, FamilyOptions(append_roles=frozenset({"tool", "user"})))


def test_missing_structural_tokens_are_an_error_at_load() -> None:
    with pytest.raises(TokenizerError, match="<think>"):
        load_family("qwen3", Tokenizer.byte_level(special=SPECIAL))
    with pytest.raises(TokenizerError, match="im_end"):
        load_family("smollm2", Tokenizer.byte_level(special=["<|im_start|>"]))
    with pytest.raises(ConfigurationError, match="choose one of qwen3, smollm2, default"):
        load_family("llama9", BYTES)
    assert family_names() == ("qwen3", "smollm2", "default")


def test_a_cut_turn_is_closed_with_its_reasoning(qwen3: Family, smollm2: Family, tokenizer: Tokenizer) -> None:
    decode, encode = tokenizer.decode, tokenizer.encode
    assert decode(qwen3.close_ids(encode("<think>\nhalf"))) == "\n</think>\n\n<|im_end|>"
    assert decode(qwen3.close_ids(encode("<think>\nr\n</think>\n\nhalf"))) == "<|im_end|>"
    assert decode(smollm2.close_ids(encode("half"))) == "<|im_end|>"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PRUNING = CHATML.replace("m.content", "(m.content if loop.last or m.role != 'assistant' else 'gone')")


def default_family(template: str) -> Family:
    return load_family("default", checkpoint(template, "<|im_end|>"))


def checkpoint(template: str, *eos_tokens: str) -> Tokenizer:
    tokenizer = Tokenizer.byte_level(SPECIAL, MARKERS)
    tokenizer.chat_template, tokenizer.eos_tokens = template, eos_tokens
    return tokenizer


@settings(max_examples=40, deadline=None)
@given(SmolChat)
def test_default_finds_suffix_and_boundary_of_a_template_that_keeps_history(messages: list[dict[str, Any]]) -> None:
    family, reference = default_family(CHATML), load_family("smollm2", BYTES)
    stored = normalize_messages([*messages, {"role": "assistant", "content": "x"}])
    more = normalize_messages([{"role": "user", "content": "q"}])
    turn = StoredTurn(BYTES.encode("x<|im_end|>"))
    found = next_prompt_suffix(family, turn, stored, more, None, {})
    assert found == next_prompt_suffix(reference, turn, stored, more, None, {})


def test_default_names_the_message_that_a_template_rewrites() -> None:
    family = default_family(PRUNING)
    stored = normalize_messages([{"role": "user", "content": "q"}, {"role": "assistant", "content": "kept"}])
    more = normalize_messages([{"role": "user", "content": "again"}])
    with pytest.raises(HistoryError, match=r"rewrites history.*message 1.*kept.*gone") as caught:
        family.suffix_text(stored, more, None, {})
    assert caught.value.code == "not_append_only"


def test_default_needs_a_template_and_an_end_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="chat template"):
        load_family("default", BYTES)
    with pytest.raises(ConfigurationError, match="eos_token"):
        load_family("default", checkpoint("x"))
    options = FamilyOptions(default_system="s")
    with_template = checkpoint("x", "<|im_end|>")
    with pytest.raises(ConfigurationError, match="system turn"):
        load_family("default", with_template, options)
    with pytest.raises(RequestError, match="cannot set messages"):
        default_family(CHATML).merge_kwargs({"messages": []})
