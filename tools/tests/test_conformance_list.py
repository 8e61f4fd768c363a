from __future__ import annotations

import pytest

from tools.conformance import Suite, previous_lists, run_suite, suites, verdict

SUITE = Suite("x", "x.conformance", ("x/*.json",), known_missing=2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", suites(), ids=lambda suite: suite.name)
def test_golden_vectors_fail_only_where_something_is_known_to_be_missing(suite: Suite):
    assert suite.paths(), f"no golden file matches {suite.files}"
    assert verdict(suite, run_suite(suite)) is None


def test_the_list_of_missing_cases_only_shrinks():
    newer = {suite.name: suite.known_missing for suite in suites()}
    for older in previous_lists():
        grown = {name: count for name, count in newer.items() if count > older.get(name, count)}
        assert grown == {}
        newer = {**newer, **older}


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        ("FAILED a: not built\nFAILED b: not built: grader x\n3 passed, 2 failed\n", None),
        ("FAILED a: not built\nFAILED b: codes differ\n3 passed, 2 failed\n", "1 failures beside"),
        ("FAILED a: not built\n4 passed, 1 failed\n", "set known_missing = 1"),
        ("F a: not built\nF b: not built\nF c: not built\n2 passed, 3 failed\n", "something was lost"),
        ("Traceback\n", "no closing line"),
        ("", "no closing line"),
    ],
)
def test_any_other_outcome_than_the_known_one_is_a_complaint(output: str, complaint: str | None):
    found = verdict(SUITE, output)
    assert (found is None) if complaint is None else (found is not None and complaint in found)
