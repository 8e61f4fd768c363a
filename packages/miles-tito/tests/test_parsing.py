"""From sampled ids to a message: markers are ids, spelling is kept, nothing that does not parse is lost."""

from __future__ import annotations

from typing import Any

import pytest

from miles_tito import Family, Tokenizer


def parse(family: Family, text: str) -> dict[str, Any]:
    return family.parse(family.tokenizer.encode(text)).message(lambda index: f"call_{index}")


def test_reasoning_and_content(qwen3: Family) -> None:
    message = parse(qwen3, "<think>\nr\n</think>\n\none<|im_end|>")
    assert (message["reasoning_content"], message["content"]) == ("r", "one")
    assert (message["x_raw_reasoning"], message["x_raw_content"]) == ("\nr\n", "\n\none")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain<|im_end|>", None, "plain"),
        ("<|im_end|>", None, ""),
        ("", None, ""),
        ("<think>\nnever closed", "never closed", ""),
        (" \n<think>a</think>b", "a", "b"),
        ("<think>a</think>b</think>c<|im_end|>", "a", "b</think>c"),
        ("text <think>late</think>", None, "text <think>late</think>"),
        ("<think></think>No.<|im_end|>", "", "No."),
        ("<think>a</think>x<|im_end|><|im_end|>", "a", "x<|im_end|>"),
    ],
)
def test_reasoning_is_found_by_ids(qwen3: Family, text: str, reasoning: str | None, content: str) -> None:
    message = parse(qwen3, text)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_marker_spelt_in_pieces_stays_text(qwen3: Family, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>not a marker</think><tool_call>{}</tool_call>", literal=True)
    message = qwen3.parse(ids).message(str)
    assert message["content"].startswith("<think>not a marker")
    assert "tool_calls" not in message


def test_calls_keep_their_spelling(qwen3: Family) -> None:
    text = (
        "<think>\nt\n</think>\n\nok \n<tool_call>\n"
        '{"name": "f", "arguments": {"b":2,"a": 1.0, "é": "\\u00e9"}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"name":"x"} , "name":"g"}</tool_call><|im_end|>'
    )
    message = parse(qwen3, text)
    assert message["content"] == "ok"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions[0] == {"name": "f", "arguments": '{"b":2,"a": 1.0, "é": "\\u00e9"}'}
    assert functions[1] == {"name": "g", "arguments": '{"name":"x"}'}
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>{bad</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_a_call_that_does_not_parse_stays_in_the_content(qwen3: Family, block: str) -> None:
    message = parse(qwen3, "before " + block + "<|im_end|>")
    assert message["content"] == "before " + block
    assert "tool_calls" not in message
    assert message["x_tool_parse_error"]


def test_calls_inside_reasoning_are_text(qwen3: Family) -> None:
    message = parse(qwen3, '<think><tool_call>{"name":"f","arguments":{}}</tool_call></think>done<|im_end|>')
    assert "tool_calls" not in message
    assert message["content"] == "done"


def test_smollm2_text_is_the_content(smollm2: Family) -> None:
    assert parse(smollm2, " <think>a</think> \n<|im_end|>") == {"role": "assistant", "content": " <think>a</think> \n"}
