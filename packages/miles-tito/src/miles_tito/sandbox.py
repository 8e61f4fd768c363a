"""The environment that templates run in: nothing of Python is reachable, nothing grows or runs uncounted.

Templates of checkpoints come from strangers. Attribute access is jinja2's immutable sandbox; what it leaves open
(loops, strings that double, structures that hold themselves twice) is bounded here, by steps and by characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import StrictUndefined, Undefined, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import TemplateError

# Filters whose cost and result are bounded by their input. The others (center, indent, sum, …) can blow a value up.
_FILTERS = frozenset(
    (
        *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int"),
        *("items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round"),
        *("safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper"),
    )
)
_GLOBALS = frozenset({"range", "dict", "namespace", "cycler", "joiner"})
_GROWING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill", "translate"})
BUDGET = "_miles_budget"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """How much one rendering may do."""

    output_chars: int = 64 << 20
    steps: int = 4_000_000


class Budget:
    """What is left of the limits in one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self.steps = limits.steps

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises `TemplateError` when none are left."""
        self.steps -= steps
        if self.steps < 0:
            raise TemplateError(f"the template took more than {self.limits.steps} steps", code="template_limit")

    def allow(self, size: int) -> None:
        """Raise `TemplateError` when a text or list of `size` is over the limit."""
        if size > self.limits.output_chars:
            raise TemplateError(f"the template makes over {self.limits.output_chars} characters", code="template_limit")

    def walk(self, value: Any) -> None:
        """Count the parts of a value before it is written out: a list that holds itself twice writes a lot."""
        self.spend()
        if isinstance(value, Mapping):
            value = value.values()
        if isinstance(value, list | tuple) or type(value).__name__ == "dict_values":
            for item in value:
                self.walk(item)

    def text(self, value: Any) -> str:
        """`value` as text."""
        if not isinstance(value, str):
            self.walk(value)
        return str(value)

    def join(self, values: Iterable[Any], separator: str = "") -> str:
        """Texts of `values`, joined."""
        pieces: list[str] = []
        size = 0
        for value in values:
            self.spend()
            pieces.append(self.text(value))
            size += len(pieces[-1]) + len(separator)
            self.allow(size)
        return separator.join(pieces)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with calls, loops and growing operations counted."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, limits: RenderLimits, *, strict: bool) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            undefined=StrictUndefined if strict else Undefined,
            finalize=_finalize,
        )
        self.filters = {name: made for name, made in self.filters.items() if name in _FILTERS}
        self.filters |= {"tojson": _to_json, "join": _join, "string": _string, "_counted": _counted, "_concat": _concat}
        self.globals = {name: value for name, value in self.globals.items() if name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self._limits = limits

    def parse_counted(self, source: str, name: str) -> nodes.Template:
        """Parse a template and put counters into it."""
        tree: nodes.Template = _Counters().visit(self.parse(source, name))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        grows = isinstance(obj, str | bytes) and attr in _GROWING_METHODS
        return not grows and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = all(isinstance(side, int | float) for side in (left, right))
        sized = operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple)
        if not (numbers and operator != "**") and not sized:
            raise TemplateError(f"{type(left).__name__} {operator} {type(right).__name__} is not allowed in a template")
        if sized:
            _budget(context).allow(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            budget.allow(len(owner) + (owner.count(args[0]) if args[0] else len(owner) + 1) * len(args[1]))
        if isinstance(owner, str) and name == "join":
            return budget.join(args[0], owner)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, range):
            budget.spend(len(result))
        return result

    def concat(self, pieces: Iterable[str]) -> str:
        """What blocks, macros and captures write."""
        return Budget(self._limits).join(pieces)


class _Counters(NodeTransformer):
    """Puts counting filters around what loops run over and what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateError("recursive loops are not allowed in a template", code="template_syntax")
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted", node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat", node.lineno)


def _filtered(node: nodes.Node, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=line)


def _budget(context: Context) -> Budget:
    return cast("Budget", context[BUDGET])


def _raise(message: str) -> None:
    raise TemplateError(f"the template refuses: {message}", code="template_refused")


@pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for item in iterable:
        budget.spend()
        yield item


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return _budget(context).join(values)


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = (context.environment.getitem(value, attribute) for value in values)
    return _budget(context).join(values, d)


@pass_context
def _string(context: Context, value: Any) -> str:
    return _budget(context).text(value)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    if not isinstance(value, str):
        _budget(context).walk(value)
    return value


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates mean it: key order and non-ASCII kept, spaces after `,` and `:`, no HTML escapes."""
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateError(f"tojson(indent={indent}) is not allowed in a template")
    _budget(context).walk(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
