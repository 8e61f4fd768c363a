"""User code by name: `package.module:function`, or the name of an entry point, checked when it is loaded."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from miles_rollout.errors import PluginError


def load_function(path: str, parameters: Sequence[str], *, kind: str) -> Callable[..., Any]:
    """The callable at `package.module:name` (`package.module.name` too), or the entry point `path` of `miles.<kind>s`.

    It must accept the named parameters as positional arguments.

    Raises:
        PluginError: nothing is there, it cannot be called, or its signature does not fit; the message has the
            expected signature.
    """
    function: Callable[..., Any] = _import(path, kind) if ":" in path or "." in path else _entry_point(path, kind)
    check_signature(function, parameters, name=path, kind=kind)
    return function


def check_signature(function: Any, parameters: Sequence[str], *, name: str, kind: str) -> None:
    """Raise PluginError unless `function` can be called with these positional arguments."""
    expected = f"a {kind} is called as {name.rpartition(':')[2]}({', '.join(parameters)})"
    if not callable(function):
        raise PluginError(f"{name} is {type(function).__name__}, which cannot be called: {expected}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise PluginError(f"{name} has the wrong signature ({error}): {expected}") from None
    except ValueError:
        return  # a builtin without a readable signature: nothing to check


def _import(path: str, kind: str) -> Any:
    module_name, separator, attribute = path.rpartition(":")
    if not separator:
        module_name, _, attribute = path.rpartition(".")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"the {kind} {path!r} cannot be loaded: {error}; write package.module:function") from error
    return found


def _entry_point(name: str, kind: str) -> Any:
    found = entry_points(group=f"miles.{kind}s", name=name)
    if not found:
        known = sorted(point.name for point in entry_points(group=f"miles.{kind}s"))
        raise PluginError(f"there is no {kind} named {name!r} (installed: {known}); write package.module:function")
    return next(iter(found)).load()
