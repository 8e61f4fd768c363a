"""`python -m tools.config_reference [--check]`: docs/reference/configuration.md, from the options of `miles.config`.

Needs the packages installed: the options are those of the code, not of a second list.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tools.workspace import ROOT

TARGET = ROOT / "docs" / "reference" / "configuration.md"
_HEADER = """# Configuration

<!-- Written by `python -m tools.config_reference` from miles.config. -->

Order: defaults < TOML files, left to right < environment < command line. An option `section.option` is

| in | as |
|---|---|
| a TOML file | `option = 8` below `[section]` |
| the environment | `MILES__SECTION__OPTION=8` |
| the command line | `--section.option 8` |

`miles config show [FILE…] [--section.option VALUE…]` prints the result with the origin of each value that was set, and
`miles config check` says whether it is valid. An unknown option is an error that names the nearest known one.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: where it is, what it takes, its default and its meaning."""

    section: str
    name: str
    kind: str
    default: str
    meaning: str


def options(model: type[Any], prefix: str = "") -> Iterator[Option]:
    """The options below a pydantic model, its own before those of its sections."""
    from pydantic import BaseModel

    sections = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            sections[name] = kind
        else:
            default = field.get_default(call_default_factory=True)
            meaning = _sentence(field.description or "")
            yield Option(prefix, name, _kind(kind), "" if field.is_required() else _value(default), meaning)
    for name, section in sections.items():
        yield from options(section, f"{prefix}.{name}" if prefix else name)


def rendered() -> str:
    """What the document must hold."""
    from miles.config import RunConfig

    lines, section = [_HEADER], None
    for option in options(RunConfig):
        if option.section != section:
            section = option.section
            title = f"`{section}`" if section else "At the top"
            lines.append(f"\n## {title}\n\n| option | takes | default | meaning |\n|---|---|---|---|\n")
        cells = (f"`{option.name}`", option.kind, f"`{option.default}`" if option.default else "", option.meaning)
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def _kind(annotation: Any) -> str:
    """A type as a reader of the table wants it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        known = [_kind(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*known, *(["none"] if type(None) in arguments else [])])
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    words = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
    return words.get(annotation, "table")


def _value(value: Any) -> str:
    """A default as TOML would have it; nothing for none."""
    from pydantic_core import to_jsonable_python

    return _literal(to_jsonable_python(value))


def _literal(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_literal(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _sentence(text: str) -> str:
    """Without a full stop, in lower case unless it starts with a name, safe in a table."""
    text = text.rstrip(".").replace("|", "\\|")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def main(arguments: list[str]) -> int:
    """Write the document, or with --check say whether it is up to date."""
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == rendered():
            return 0
        print(f"{TARGET.relative_to(ROOT)} is not what miles.config says: run `python -m tools.config_reference`")
        return 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(rendered(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
