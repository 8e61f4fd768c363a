from __future__ import annotations

import pytest

from tools.imports import forbidden, imported_modules, violations
from tools.workspace import INTEGRATION, LEAVES


def test_no_leaf_imports_another():
    assert list(violations()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import miles_tito.codec",
        "from miles_tito import codec",
        "def f():\n    from miles_tito.codec import x",
        "import importlib\nimportlib.import_module('miles_tito.codec')",
        "from importlib import import_module\nimport_module('miles_tito')",
        "__import__('miles_tito')",
    ],
)
def test_every_way_to_import_is_seen(source: str):
    assert "miles_tito" in {name for _, name in imported_modules(source)}


def test_relative_imports_and_text_are_not_taken_for_imports():
    assert list(imported_modules("from . import miles_tito\nx = 'import miles_tito'")) == []


def test_leaves_may_import_themselves_and_the_integration_may_import_leaves():
    tito, rollout = LEAVES[:2]
    assert tito.module not in forbidden(tito)
    assert {rollout.module, INTEGRATION.module} <= forbidden(tito)
    assert tito.module not in forbidden(INTEGRATION)
