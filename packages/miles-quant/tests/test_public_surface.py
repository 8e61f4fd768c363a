from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import miles_quant

README = Path(__file__).resolve().parents[1] / "README.md"


def test_every_public_name_resolves():
    for name in miles_quant.__all__:
        assert getattr(miles_quant, name).__name__ == name
    assert list(miles_quant.__all__) == sorted(miles_quant.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(miles_quant, "quantise")


def test_the_readme_example_runs():
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
