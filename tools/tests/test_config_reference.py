"""docs/reference/configuration.md says what the code says."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest

pytest.importorskip("miles", reason="the options are those of the installed packages")

from pydantic import BaseModel, Field

from tools.config_reference import Option, main, options


class Inner(BaseModel):
    size: Annotated[int, Field(ge=1)] | None = Field(None, description="Rows of a block.")


class Outer(BaseModel):
    inner: Inner = Field(default_factory=Inner)
    kind: Literal["a", "b"] = Field("a", description="GPU or a|b")
    names: tuple[str, ...] = ()
    needed: float


def test_the_document_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "run `python -m tools.config_reference`"


def test_options_are_read_from_a_model() -> None:
    assert list(options(Outer)) == [
        Option("", "kind", "`a`, `b`", '"a"', "GPU or a\\|b"),
        Option("", "names", "list of text", "[]", ""),
        Option("", "needed", "number", "", ""),
        Option("inner", "size", "integer or none", "", "rows of a block"),
    ]
