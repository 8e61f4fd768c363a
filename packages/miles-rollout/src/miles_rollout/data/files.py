"""Reading prompts from `.jsonl` files, with errors that name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_rollout.config import DataConfig
from miles_rollout.data.prompts import Prompt
from miles_rollout.errors import PromptFileError, PromptFileMissingError

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>\d*):(?P<stop>\d*)\]$")


def split_slice(path: str) -> tuple[str, slice]:
    """`data.jsonl@[2:5]` as the path and the rows it selects (rows 2, 3, 4; blank lines are no rows)."""
    match = _SLICE.match(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def read_prompts(path: str | Path, config: DataConfig) -> list[Prompt]:
    """The prompts of a `.jsonl` file, or of the rows that `path@[a:b]` selects.

    Raises:
        PromptFileMissingError: there is no such file.
        PromptFileError: a line is malformed (named by its number), ids repeat, or nothing is left.
    """
    name, rows = split_slice(str(path))
    file = Path(name)
    if file.suffix != ".jsonl":
        raise PromptFileError(
            f"{name}: prompts are read from .jsonl files, not from {file.suffix or 'a nameless type'}"
        )
    if not file.is_file():
        raise PromptFileMissingError(f"{name}: there is no such prompt file; check rollout.data and the working folder")
    prompts = list(_parse_lines(file, config))[rows]
    if not prompts:
        raise PromptFileError(f"{path}: no prompt is left: the file is empty or the row slice selects nothing")
    _check_unique(name, prompts)
    return prompts


def _parse_lines(file: Path, config: DataConfig) -> Iterator[Prompt]:
    row = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield parse_row(json.loads(line), row, config)
            except (ValueError, UnicodeDecodeError) as error:
                raise PromptFileError(f"{file}, line {number}: {error}") from None
            row += 1


def parse_row(row: Any, position: int, config: DataConfig) -> Prompt:
    """One decoded line as a prompt; without an id column its id is the row's position. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"a prompt is an object, not {type(row).__name__}")
    if config.label_key and config.label_key not in row:
        raise ValueError(f"the label column {config.label_key!r} is missing; there are {sorted(row)}")
    return Prompt(
        prompt_id=_prompt_id(row, position, config),
        messages=_messages(row, config.input_key),
        label=row[config.label_key] if config.label_key else None,
        metadata=_metadata(row, config.metadata_key),
    )


def _prompt_id(row: Mapping[str, Any], position: int, config: DataConfig) -> str:
    value = row.get(config.id_key, position)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"the id column {config.id_key!r} holds {value!r}; an id is text or an integer")
    return str(value)


def _messages(row: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    if key not in row:
        raise ValueError(f"the prompt column {key!r} is missing; there are {sorted(row)}")
    value = row[key]
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return value
    raise ValueError(f"the prompt column {key!r} is neither text nor a list of messages with roles")


def _metadata(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"the metadata column {key!r} holds {type(value).__name__}, not an object")
    return value


def _check_unique(name: str, prompts: list[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise PromptFileError(f"{name}: the prompt id {prompt.prompt_id!r} occurs twice; ids must differ")
        seen.add(prompt.prompt_id)
