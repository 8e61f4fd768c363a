"""Chat templates in a sandbox: no attribute of Python is reachable, loops are counted, the output is capped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

from jinja2 import StrictUndefined, Template, Undefined, nodes, pass_context
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import TemplateError

# Filters whose cost and result are bounded by their input. The others (center, indent, format, …) can blow a string up.
_FILTERS = frozenset(
    [
        "abs",
        "attr",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "sum",
        "title",
        "trim",
        "unique",
        "upper",
    ]
)
_GROWING_METHODS = frozenset(["center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill", "translate"])
_BUDGET = "_miles_budget"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """How much one rendering may do."""

    output_chars: int = 64 << 20
    steps: int = 4_000_000


class _Budget:
    """What is left of the limits in one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self.steps = limits.steps

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TemplateError(f"the template took more than {self.limits.steps} steps", code="template_limit")

    def allow(self, chars: int) -> None:
        if chars > self.limits.output_chars:
            raise TemplateError(f"the template makes over {self.limits.output_chars} characters", code="template_limit")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with every call and loop step counted and no operation that multiplies strings."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        grows = isinstance(obj, str) and attr in _GROWING_METHODS
        return not grows and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator != "**" and all(isinstance(side, int | float) for side in (left, right)):
            return super().call_binop(context, operator, left, right)
        raise TemplateError(f"{type(left).__name__} {operator} {type(right).__name__} is not allowed in a template")

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = cast("_Budget", context[_BUDGET])
        budget.spend()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and getattr(obj, "__name__", "") == "replace":
            budget.allow(len(owner) + (owner.count(args[0]) if args[0] else len(owner) + 1) * len(args[1]))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, range):
            budget.spend(len(result))
        return result


class ChatTemplate:
    """One compiled template. Own templates are strict about undefined names; a checkpoint's own is not."""

    def __init__(self, source: str, *, name: str, strict: bool = True, limits: RenderLimits | None = None) -> None:
        self.name = name
        self.limits = limits or RenderLimits()
        environment = _environment(strict)
        try:
            tree = environment.parse(source, name)
            _count_loops(tree)
            code = environment.compile(tree, name, name)
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
        budget = _Budget(self.limits)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate({"messages": messages, **variables, _BUDGET: budget}):
                size += len(piece)
                budget.allow(size)
                pieces.append(piece)
        except TemplateError:
            raise
        except (JinjaError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"template {self.name}: {type(error).__name__}: {error}") from error
        return "".join(pieces)


def _environment(strict: bool) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        extensions=["jinja2.ext.loopcontrols"],
        undefined=StrictUndefined if strict else Undefined,
    )
    environment.filters = {name: made for name, made in environment.filters.items() if name in _FILTERS}
    environment.filters["tojson"] = to_json
    environment.filters["_counted"] = _counted
    environment.globals["raise_exception"] = _raise
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates mean it: key order kept, non-ASCII kept, `", "` and `": "` between parts, nothing
    escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(f"the template refuses: {message}", code="template_refused")


def _count_loops(tree: nodes.Template) -> None:
    """Pass the iterable of every loop through a filter that counts its steps."""
    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            raise TemplateError("recursive loops are not allowed in a template", code="template_syntax")
        loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)


@pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    spend: Callable[[], None] = context[_BUDGET].spend
    for item in iterable:
        spend()
        yield item
