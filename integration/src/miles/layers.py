"""Where a configuration comes from: defaults < TOML files, left to right < environment < command line.

Environment: `MILES__LOOP__STEPS=8`. Command line: `--loop.steps 8` or `--loop.steps=8`.
Values are read as TOML, else as text.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from miles.config import RunConfig
from miles.errors import ConfigError

ENVIRONMENT_PREFIX = "MILES__"

Dotted = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it was set."""

    path: Dotted
    value: Any
    origin: str

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid configuration with the origin of every value that is not a default."""

    config: RunConfig
    origins: Mapping[str, str]


def resolve(settings: Iterable[Setting]) -> Resolved:
    """Merge settings, later ones win. Raises `ConfigError` naming the option, where it was set, and what to do."""
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    flags: list[Setting] = []
    for setting in _leaves(settings):
        _put(tree, setting)
        origins[setting.name] = setting.origin
        flags += [setting] if isinstance(setting.value, bool) else []
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, origins) for item in error.errors())) from None
    _refuse_flags_for_numbers(config, flags, origins)
    return Resolved(config, origins)


def _leaves(settings: Iterable[Setting]) -> Iterable[Setting]:
    """A table given as one value sets its members; the section's other options stay as they are."""
    for setting in settings:
        if isinstance(setting.value, Mapping):
            yield from from_tree(setting.value, setting.origin, setting.path)
        else:
            yield setting


def _refuse_flags_for_numbers(config: RunConfig, flags: Iterable[Setting], origins: Mapping[str, str]) -> None:
    """`--loop.steps` without its value would otherwise be one step: a truth value counts as a number."""
    for flag in flags:
        value: Any = config
        for key in flag.path:
            value = getattr(value, key, None)
        if origins[flag.name] == flag.origin and isinstance(value, int | float) and not isinstance(value, bool):
            raise ConfigError(f"{flag.name} ({flag.origin}): expected a number, got {str(flag.value).lower()}")


def from_file(path: Path) -> list[Setting]:
    """The settings of a TOML file."""
    try:
        return list(from_tree(tomllib.loads(path.read_text()), str(path.name)))
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from None


def from_tree(tree: Mapping[str, Any], origin: str, prefix: Dotted = ()) -> Iterable[Setting]:
    """The leaves of nested tables."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from from_tree(value, origin, (*prefix, key))
        else:
            yield Setting((*prefix, key), value, origin)


def from_environment(environment: Mapping[str, str]) -> list[Setting]:
    """The settings in `MILES__SECTION__OPTION` variables."""
    return [
        Setting(tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")), parse_value(text), f"${name}")
        for name, text in sorted(environment.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    ]


def from_arguments(arguments: Sequence[str]) -> list[Setting]:
    """The settings in `--a.b value` and `--a.b=value` arguments. A bare `--a.b` means true."""
    settings = []
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--") or option == "--":
            raise ConfigError(f"expected an option like --loop.steps 8, got {option!r}")
        name, equals, text = option.removeprefix("--").partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        settings.append(Setting(tuple(name.replace("-", "_").split(".")), parse_value(text), "command line"))
    return settings


def parse_value(text: str) -> Any:
    """`text` as one TOML value (numbers, booleans, lists, tables), else as it is."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def to_toml(resolved: Resolved) -> str:
    """The whole configuration as TOML, with the origin of each value that was set."""
    lines: list[str] = []
    _emit(resolved.config.model_dump(mode="json"), (), resolved.origins, lines)
    return "\n".join(lines).strip() + "\n"


def _emit(tree: Mapping[str, Any], prefix: Dotted, origins: Mapping[str, str], lines: list[str]) -> None:
    values = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if values and prefix:
        lines.append(f"\n[{'.'.join(prefix)}]")
    for key, value in values.items():
        if value is not None:
            origin = origins.get(".".join((*prefix, key)))
            lines.append(f"{key} = {_literal(value)}" + (f"  # {origin}" if origin else ""))
    for key, value in tree.items():
        if isinstance(value, Mapping):
            _emit(value, (*prefix, key), origins, lines)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_literal(item)}" for key, item in value.items() if item is not None) + "}"
    # TOML's basic strings are JSON's, but for surrogate escapes and a raw DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _put(tree: dict[str, Any], setting: Setting) -> None:
    node = tree
    for key in setting.path[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{setting.origin}: {setting.name} is inside {key!r}, which is a value, not a section")
        node = child
    node[setting.path[-1]] = setting.value


def _explain(item: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in item["loc"])
    origin = origins.get(name, "")
    name = name if name.isprintable() else repr(name)
    where = f" ({origin})" if origin else ""
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, option_names(RunConfig), n=1)
        hint = f"; did you mean {near[0]}?" if near else "; `miles config show` lists the options"
        return f"unknown option {name}{where}{hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{name}{where}: {message}" if name else message


def option_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all options below `model`."""
    names: list[str] = []
    for key, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += option_names(kind, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names
