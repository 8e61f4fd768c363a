"""Configuration: order of layers, origins, and errors that name the option."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import RunConfig
from miles.errors import ConfigError
from miles.layers import Setting, from_arguments, from_environment, from_file, option_names, resolve, to_toml


def test_later_layers_win_and_keep_their_origin(tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text("[loop]\nsteps = 3\nseed = 5\n")
    environment = from_environment({"MILES__LOOP__STEPS": "4", "HOME": "/"})
    resolved = resolve([*from_file(recipe), *environment, *from_arguments(["--loop.steps", "6"])])
    assert (resolved.config.loop.steps, resolved.config.loop.seed) == (6, 5)
    assert resolved.origins == {"loop.steps": "command line", "loop.seed": "a.toml"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loop.stepz", "3"], r"unknown option loop.stepz \(command line\); did you mean loop.steps\?"),
        (["--loop.steps", "none"], r"loop.steps \(command line\): .*valid integer"),
        (["--loop.steps", "0"], r"loop.steps \(command line\): .*greater than 0"),
        (["steps"], "expected an option like --loop.steps 8, got 'steps'"),
        (["--weightsync.pause_mode", "abort"], "needs rollout.buffer.max_staleness 0, got 2"),
        (["--trainer.replay.enabled"], "needs tito.session.record_experts"),
        (["--numerics.batch_invariant"], "needs rollout.engine.max_context"),
        (["--loop.steps"], r"loop.steps \(command line\): expected a number, got true"),
        (["--loop.steps", "3\nseed = 9"], r"loop.steps \(command line\): .*valid integer"),
        (["--loop.steps", "[" * 5000], r"loop.steps \(command line\): .*valid integer"),
        (["--loop.steps", "9" * 5000], r"loop.steps \(command line\): .*integer"),
        (["--loop.a\nb", "3"], r"unknown option 'loop.a\\nb'"),
    ],
)
def test_an_option_that_cannot_work_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(from_arguments(arguments))


def test_a_missing_or_broken_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe at"):
        from_file(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[loop\n")
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*broken.toml"):
        from_file(broken)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a." * 3000 + "b = 1", "a = " + "9" * 5000], ids=len)
def test_a_recipe_no_parser_can_follow_is_named(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "deep.toml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*deep.toml"):
        from_file(recipe)


def test_a_table_as_one_value_leaves_its_sections_other_options(tmp_path: Path) -> None:
    environment = from_environment({"MILES__LOOP": "{steps = 4}"})
    resolved = resolve([*from_arguments(["--loop.steps", "3", "--loop.evaluate", "false"]), *environment])
    assert (resolved.config.loop.steps, resolved.config.loop.evaluate) == (4, False)
    assert resolved.origins == {"loop.steps": "$MILES__LOOP", "loop.evaluate": "command line"}


def test_the_printed_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    resolved = resolve(from_arguments(["--loop.steps", "3", "--faults", '[{kind = "flip_token", after = 1}]']))
    text = to_toml(resolved)
    assert "steps = 3  # command line" in text
    printed = tmp_path / "printed.toml"
    printed.write_text(text)
    assert resolve(from_file(printed)).config == resolved.config


def test_every_option_has_a_name_and_a_description() -> None:
    names = option_names(RunConfig)
    assert len(names) == len(set(names)) > 50


@given(st.one_of(st.integers(), st.booleans(), st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]))))
def test_values_survive_printing(value: object) -> None:
    from miles.layers import _literal

    assert tomllib.loads(f"x = {_literal(value)}")["x"] == value


def test_a_value_and_a_section_of_one_name_clash() -> None:
    with pytest.raises(ConfigError, match="inside 'steps', which is a value"):
        resolve([Setting(("loop", "steps"), 3, "a"), Setting(("loop", "steps", "x"), 1, "b")])
