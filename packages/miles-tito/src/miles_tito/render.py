"""Chat templates: compiled once, rendered in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError as JinjaError

from .errors import TemplateError
from .sandbox import BUDGET, Budget, RenderLimits, Sandbox

# What jinja2 and the operations that a template may use can raise.
_FAILURES = (JinjaError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class ChatTemplate:
    """One compiled template. Own templates are strict about undefined names; a checkpoint's own is not."""

    def __init__(self, source: str, *, name: str, strict: bool = True, limits: RenderLimits | None = None) -> None:
        self.name = name
        self.limits = limits or RenderLimits()
        environment = Sandbox(self.limits, strict=strict)
        try:
            code = environment.compile(environment.parse_counted(source, name), name, name)
        except JinjaError as error:
            raise TemplateError(f"template {name} does not parse: {error}", code="template_syntax") from error
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    @classmethod
    def packaged(cls, name: str, *, limits: RenderLimits | None = None) -> ChatTemplate:
        """The template `name` that ships with this package."""
        source = resources.files(__package__).joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")
        return cls(source, name=name, limits=limits)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render `messages`. Raises `TemplateError` when the template raises, prints too much or runs too long."""
        budget = Budget(self.limits)
        context = {"messages": messages, **variables, BUDGET: budget}
        try:
            return budget.join(self._template.generate(context))
        except TemplateError:
            raise
        except _FAILURES as error:
            raise TemplateError(f"template {self.name}: {type(error).__name__}: {error}") from error
