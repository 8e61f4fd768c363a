"""docs/verified.md: what tests declare is recorded, written and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.verified import complaints, declared, declared_in, main, rendered
from tools.workspace import ROOT

pytest_plugins = ("pytester",)

MARKED = """
import pytest

@pytest.mark.verifies("pytest", "runs tests")
@pytest.mark.parametrize("good", [True, False])
def test_marked(good):
    assert good

@pytest.mark.verifies("a tokenizer", "is there", version="3.7")
def test_skipped():
    pytest.skip("absent")

def test_unmarked():
    pass
"""


def test_the_document_names_only_what_tests_declare() -> None:
    assert main(["--check"]) == 0


def test_outcomes_of_marked_tests_are_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MARKED)
    pytester.makeini(f"[pytest]\npythonpath = {ROOT}\nmarkers = verifies: what a test met")
    pytester.makeconftest('pytest_plugins = ("tools.verifying",)')
    run = pytester.runpytest_subprocess("--verified", "results.json")
    run.assert_outcomes(passed=2, failed=1, skipped=1)
    results = json.loads(Path(pytester.path, "results.json").read_text())["results"]
    assert sorted((r["package"], r["version"], r["outcome"]) for r in results) == [
        ("a tokenizer", "3.7", "skipped"),
        ("pytest", pytest.__version__, "failed"),
        ("pytest", pytest.__version__, "passed"),
    ]


def test_a_row_counts_the_tests_of_a_claim() -> None:
    result = {"package": "torch", "version": "2.13.0", "claim": "adds", "test": "a/test_b.py::test_c[0]"}
    document = rendered("Linux", [{**result, "outcome": "passed"}, {**result, "outcome": "failed"}])
    assert "| `torch` | 2.13.0 | adds | `a/test_b.py` | 1 | 1 | 0 |" in document
    assert complaints(document, {("torch", "adds")}) == []
    assert complaints(document, {("torch", "subtracts")}) == ["no test declares torch: adds"]
    assert complaints(document, {("torch", "adds"), ("SGLang", "x")})[0].startswith("SGLang is listed")
    assert complaints(document + "more", {("torch", "adds")}) != []


def test_marks_are_read_from_source() -> None:
    assert list(declared_in(MARKED)) == [("pytest", "runs tests"), ("a tokenizer", "is there")]
    assert {"transformers", "openai", "torch", "safetensors"} <= {package for package, _ in declared()}
