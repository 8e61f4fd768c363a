from __future__ import annotations

from tools import constraints


def test_constraints_txt_is_what_pyproject_says():
    assert constraints.TARGET.read_text(encoding="utf-8") == constraints.rendered()


def test_everything_asked_for_is_pinned():
    assert constraints.unpinned() == []


def test_lines_are_names_with_exact_versions_only():
    lines = constraints.rendered().splitlines()[1:]
    assert len(lines) > 20
    assert all(line.count("==") == 1 and " " not in line and ":" not in line for line in lines)
