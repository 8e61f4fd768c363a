"""The sandbox: templates render, and cannot reach Python, loop for ever or print without end."""

from __future__ import annotations

import pytest

from miles_tito import TemplateError
from miles_tito.render import ChatTemplate
from miles_tito.sandbox import RenderLimits

DOUBLE = "{{% set ns = namespace(s='ab') %}}{{% for i in range(60) %}}{{% set ns.s = {} %}}{{% endfor %}}"
SMALL = RenderLimits(output_chars=10_000, steps=10_000)


def render(source: str, messages: list[dict[str, object]] | None = None, **variables: object) -> str:
    return ChatTemplate(source, name="test", strict=False, limits=SMALL).render(messages or [], **variables)


def test_json_keeps_order_and_characters() -> None:
    value = {"b": "é<&'", "a": [1, 2.5, None, True]}
    assert render("{{ value | tojson }}", value=value) == '{"b": "é<&\'", "a": [1, 2.5, null, true]}'


def test_loop_variables_work_as_in_plain_jinja() -> None:
    source = "{% for m in messages %}{{ loop.index }}{{ '!' if loop.last }}{{ loop.length }} {% endfor %}"
    assert render(source, [{}, {}]) == "12 2!2 "
    inner = "{{ loop.previtem.r if not loop.first }}{{ loop.nextitem.r if not loop.last }};"
    source = "{% for m in messages %}" + inner + "{% endfor %}"
    assert render(source, [{"r": 1}, {"r": 2}]) == "2;1;"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ (messages | attr('__class__')) }}",
        "{{ messages.append(1) }}",
        "{% set x = messages.pop() %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ 'x' * 100000000 }}",
        "{{ [1] * 100000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%100000000d' % 1 }}",
        "{{ 'x'.ljust(100000000) }}",
        "{{ '{:>100000000}'.format(1) }}",
        "{{ 'x' | center(100000000) }}",
        "{{ ('x' * 3) }}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(9) %}"
        "{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for i in range(9000) %}xxxxxxxxxx{% endfor %}",
        "{{ range(100000000) | list }}",
        DOUBLE.format("ns.s ~ ns.s"),
        DOUBLE.format("ns.s + ns.s"),
        DOUBLE.format("[ns.s, ns.s] | join"),
        DOUBLE.format("''.join([ns.s, ns.s])"),
        DOUBLE.format("[ns.s, ns.s]") + "{{ ns.s }}",
        DOUBLE.format("[ns.s, ns.s]") + "{{ ns.s | tojson }}",
        DOUBLE.format("[ns.s, ns.s]") + "{{ ns.s | string }}",
        DOUBLE.format("{'a': ns.s, 'b': ns.s}") + "{{ ns.s ~ 'x' }}",
        "{% set s = 'ab' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
        "{{ lipsum(1000000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ 'x'.encode().ljust(1000000000) }}",
    ],
)
def test_an_attack_is_a_template_error_or_harmless(source: str) -> None:
    try:
        text = render(source, [{"role": "user"}])
    except TemplateError:
        return
    assert len(text) < 200
    assert "<class" not in text
    assert "globals" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}",
        "{% for i in range(9000) %}xxxxxxxxxx{% endfor %}",
    ],
)
def test_limits_have_their_own_code(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert caught.value.code == "template_limit"


def test_what_a_template_raises_reaches_the_client() -> None:
    with pytest.raises(TemplateError, match="no system in the middle") as caught:
        render("{{ raise_exception('no system in the middle') }}")
    assert caught.value.code == "template_refused"


def test_a_broken_template_names_itself() -> None:
    with pytest.raises(TemplateError, match="template test does not parse"):
        render("{% for %}")
    with pytest.raises(TemplateError, match="recursive"):
        render("{% for m in messages recursive %}{{ loop(m) }}{% endfor %}")


def test_own_templates_are_strict_about_names() -> None:
    with pytest.raises(TemplateError, match="undefined"):
        ChatTemplate("{{ nothing }}", name="own").render([])
