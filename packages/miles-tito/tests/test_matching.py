"""Matchers beyond the golden table: hostile input, and what a client is told."""

from __future__ import annotations

import pytest

from miles_tito import MATCHERS, ConfigurationError, matcher_named
from miles_tito.matching import first_difference, loose_tool_call, strict


def call(arguments: object) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_deep_nesting_does_not_crash() -> None:
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    assert strict(call(deep), call(deep))
    assert not loose_tool_call(call(deep), call(deep + " "))
    assert not loose_tool_call(call('{"a":1e999999999}'), call('{"a":1}'))


def test_a_difference_names_field_text_and_matcher() -> None:
    difference = first_difference(call('{"a":1}'), call('{"a": 1}'))
    assert (difference.field, difference.accepted_by) == ("tool_calls", "loose_tool_call")
    difference = first_difference({"role": "user", "content": "abc"}, {"role": "user", "content": "abd"})
    assert (difference.field, difference.stored, difference.replayed, difference.accepted_by) == (
        "content",
        "abc",
        "abd",
        None,
    )


@pytest.mark.parametrize("name", MATCHERS)
@pytest.mark.parametrize("odd", [{"tool_calls": 3}, {"tool_calls": "x"}, {"tool_calls": [None]}, {"content": {"a": 1}}])
def test_odd_values_never_raise(name: str, odd: dict[str, object]) -> None:
    matcher = matcher_named(name)
    assert matcher({"role": "assistant", **odd}, {"role": "assistant", **odd})
    matcher({"role": "assistant", "content": "x"}, {"role": "assistant", **odd})


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigurationError, match="strict, loose_tool_call, role_content_only"):
        matcher_named("sloppy")
