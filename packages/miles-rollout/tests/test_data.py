"""Prompts: files with line numbers, epochs, and the frontier."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rollout import Frontier, Prompt, PromptKey, PromptSource
from miles_rollout.config import DataConfig
from miles_rollout.data.files import read_prompts
from miles_rollout.errors import FrontierError, LedgerError, PromptFileError, PromptFileMissingError


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), [{"role": "user", "content": str(i)}]) for i in range(count)]


def ids(source: PromptSource, count: int) -> list[str]:
    return [draw.prompt.prompt_id for draw in source.draw_many(count)]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_text_becomes_one_user_message_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"input": "1+1?", "answer": 2, "metadata": {"level": 1}}',
        "",
        '{"id": "b", "input": "x", "answer": 3}',
    )
    first, second = read_prompts(path, DataConfig(label_key="answer"))
    assert first == Prompt("0", [{"role": "user", "content": "1+1?"}], 2, {"level": 1})
    assert (second.prompt_id, second.label, second.metadata) == ("b", 3, {})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"input": "x"', "Expecting ',' delimiter"),
        ("[1]", "a prompt is an object, not list"),
        ('{"text": "x"}', r"the prompt column 'input' is missing; there are \['text'\]"),
        ('{"input": ""}', "the prompt column 'input' is neither text nor a list of messages with roles"),
        ('{"input": [{"content": "x"}]}', "neither text nor a list of messages"),
        ('{"input": "x", "id": 1.5}', "the id column 'id' holds 1.5"),
        ('{"input": "x", "metadata": 3}', "the metadata column 'metadata' holds int"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, fault: str) -> None:
    path = write(tmp_path, '{"input": "fine"}', "", line)
    with pytest.raises(PromptFileError, match=rf"prompts\.jsonl, line 3: .*{fault}"):
        read_prompts(path, DataConfig())


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"input": "x"}\n{"input": "\xff"}\n')
    with pytest.raises(PromptFileError, match="line 2"):
        read_prompts(path, DataConfig())


def test_a_missing_label_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="line 1: the label column 'answer' is missing"):
        read_prompts(write(tmp_path, '{"input": "x"}'), DataConfig(label_key="answer"))


def test_a_missing_file_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(PromptFileMissingError, match="there is no such prompt file"):
        read_prompts(tmp_path / "nothing.jsonl", DataConfig())


def test_an_empty_file_another_type_and_repeated_ids_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="no prompt is left"):
        read_prompts(write(tmp_path, ""), DataConfig())
    with pytest.raises(PromptFileError, match=r"not from \.parquet"):
        read_prompts(tmp_path / "x.parquet", DataConfig())
    with pytest.raises(PromptFileError, match="'a' occurs twice"):
        read_prompts(write(tmp_path, *['{"id": "a", "input": "x"}'] * 2), DataConfig())


def test_a_row_slice_selects_rows(tmp_path: Path) -> None:
    path = write(tmp_path, *[f'{{"input": "{i}"}}' for i in range(5)])
    assert [prompt.prompt_id for prompt in read_prompts(f"{path}@[1:3]", DataConfig())] == ["1", "2"]
    assert len(read_prompts(f"{path}@[3:]", DataConfig())) == 2


def test_drawing_runs_over_the_end_as_often_as_needed() -> None:
    source = PromptSource(prompts(3), DataConfig())
    assert ids(source, 10) == ["0", "1", "2"] * 3 + ["0"]
    frontier = source.frontier()
    assert (frontier.epoch, frontier.offset, frontier.next_group_id) == (3, 1, 10)


def test_each_epoch_has_its_own_order() -> None:
    source = PromptSource(prompts(5), DataConfig(shuffle=True))
    assert ids(source, 10) == ["3", "1", "2", "4", "0", "1", "4", "3", "2", "0"]


def test_the_last_epoch_ends_and_a_returned_prompt_opens_it_again() -> None:
    source = PromptSource(prompts(2), DataConfig(epochs=1))
    assert ids(source, 5) == ["0", "1"]
    assert source.exhausted
    source.give_back(PromptKey("0", 0))
    assert not source.exhausted
    draw = source.draw()
    assert draw is not None
    assert (draw.prompt.prompt_id, draw.group_id, draw.attempt) == ("0", 0, 1)
    assert source.draw() is None


def test_returned_prompts_come_first_oldest_draw_first() -> None:
    source = PromptSource(prompts(6), DataConfig())
    ids(source, 4)
    for prompt_id in ("2", "0"):
        source.give_back(PromptKey(prompt_id, 0))
    assert ids(source, 3) == ["0", "2", "4"]


def test_a_prompt_cannot_come_back_twice_or_after_its_outcome() -> None:
    source = PromptSource(prompts(2), DataConfig())
    ids(source, 2)
    source.give_back(PromptKey("0", 0))
    with pytest.raises(LedgerError, match="given back twice"):
        source.give_back(PromptKey("0", 0))
    source.settle(PromptKey("1", 0))
    with pytest.raises(LedgerError, match="owed no outcome"):
        source.give_back(PromptKey("1", 0))


def test_a_resume_serves_the_unfinished_first_and_none_twice() -> None:
    source = PromptSource(prompts(8), DataConfig())
    ids(source, 6)
    for trained in ("0", "3"):
        source.settle(PromptKey(trained, 0))
    resumed = PromptSource(prompts(8), DataConfig())
    resumed.load_frontier(Frontier.from_json(source.frontier().to_json()))
    assert ids(resumed, 6) == ["1", "2", "4", "5", "6", "7"]


def test_one_dropped_prompt_does_not_pin_the_position() -> None:
    source = PromptSource(prompts(200), DataConfig())
    for key in [draw.key for draw in source.draw_many(150)]:
        source.settle(key)
    assert source.frontier().unsettled == ()
    resumed = PromptSource(prompts(200), DataConfig())
    resumed.load_frontier(source.frontier())
    assert ids(resumed, 1) == ["150"]


def test_a_frontier_of_other_prompts_is_refused() -> None:
    source = PromptSource(prompts(8), DataConfig())
    ids(source, 8)
    with pytest.raises(FrontierError, match="resume with the prompt file of that run"):
        PromptSource(prompts(3), DataConfig()).load_frontier(source.frontier())
    with pytest.raises(FrontierError, match="no saved data position"):
        Frontier.from_json({"epoch": 1})


def test_no_prompts_and_repeated_ids_are_errors() -> None:
    with pytest.raises(PromptFileError, match="no prompts"):
        PromptSource([], DataConfig())
    with pytest.raises(PromptFileError, match="same id"):
        PromptSource(prompts(1) * 2, DataConfig())


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(st.sampled_from(["draw", "settle", "return", "restart"]), max_size=60),
    size=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_every_prompt_of_every_epoch_is_drawn_until_it_settles(moves: list[str], size: int, shuffle: bool) -> None:
    config = DataConfig(shuffle=shuffle)
    source = PromptSource(prompts(size), config)
    out: list[PromptKey] = []
    settled: list[PromptKey] = []
    for move in moves:
        if move == "draw":
            [draw] = source.draw_many(1)
            assert draw.key not in settled
            out.append(draw.key)
        elif move == "restart":
            frontier, source = source.frontier(), PromptSource(prompts(size), config)
            source.load_frontier(frontier)
            out.clear()
        elif out:
            key = out.pop(0)
            (source.settle if move == "settle" else source.give_back)(key)
            settled += [key] if move == "settle" else []
    frontier = source.frontier()
    assert len(settled) == len(set(settled))
    assert len(settled) + len(frontier.unsettled) == frontier.next_group_id == frontier.epoch * size + frontier.offset
