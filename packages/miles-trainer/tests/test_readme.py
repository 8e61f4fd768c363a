"""The README's example runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    exec(compile(example, "README.md", "exec"), {})
    assert len([line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"-?\d.*", line)]) == 2
