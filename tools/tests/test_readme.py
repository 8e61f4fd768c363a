from __future__ import annotations

from pathlib import Path

import pytest

from tools.readme import Block, blocks, command, run_block
from tools.workspace import PACKAGES, ROOT

TEXT = "# x\n<!-- command: tests -->\n```bash\none\ntwo\n```\n<!-- command: main-job -->\nno block\n"


def test_the_command_is_the_block_after_its_mark():
    assert command("tests", TEXT) == "one\ntwo"


@pytest.mark.parametrize("name", ["main-job", "other"])
def test_a_mark_without_a_block_is_no_command(name: str):
    assert command(name, TEXT) is None


@pytest.mark.parametrize("name", ["main-job", "tests"])
def test_the_readme_marks_both_commands(name: str):
    assert command(name, (ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_package_shows_how_to_use_it():
    shown = {block.file for block in blocks()}
    assert {ROOT / package.path / "README.md" for package in PACKAGES if package.name != "miles"} <= shown


def test_a_block_that_fails_is_reported():
    assert run_block(Block(Path("x.md"), 1, "assert 1 + 1 == 2")) is None
    assert "AssertionError" in str(run_block(Block(Path("x.md"), 1, "assert 1 + 1 == 3")))
