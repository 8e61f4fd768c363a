"""The report: what it says about a whole run, about a broken one, and about a folder with missing pieces."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.environment import environment
from miles.report import write_report
from miles.report.drawing import inline
from miles.report.heldout import Share, comparisons
from miles.report.page import shortened
from miles.report.tokens import choose
from miles.run_folder import RunFolder

FIGURES = {"reward.png", "heldout.png", "logprob_difference.png", "staleness.png", "timeline.png"}
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Text, headings and addresses of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids += [found["id"] or ""] if "id" in found else []
        loaded = found.get("src") or found.get("href") or found.get("xlink:href")
        self.loads += [loaded] if loaded and not loaded.startswith("#") else []

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def finished(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    import asyncio

    from miles.layers import Setting, from_file, resolve
    from miles.run import run_training
    from miles.ui import Silent

    recipe = Path(__file__).parents[1] / "src" / "miles" / "recipes" / "tiny.toml"
    changes = {("model", "path"): str(toy), ("loop", "steps"): 3, ("task", "held_out"): 8}
    settings = [Setting(path, value, "test") for path, value in changes.items()]
    folder = tmp_path_factory.mktemp("runs") / "finished"
    asyncio.run(run_training(resolve([*from_file(recipe), *settings]), folder, Silent()))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> RunFolder:
    """A copy to break."""
    return RunFolder(Path(shutil.copytree(finished, tmp_path / "copied")))


def page_of(folder: RunFolder) -> Page:
    return Page(write_report(folder).read_text())


def test_a_finished_run_has_every_section_and_figure(finished: Path) -> None:
    page = Page((finished / "report.html").read_text())
    assert page.loads == [], "the page is self-contained"
    assert len(page.ids) == len(set(page.ids)), "ids of the figures do not clash"
    assert "3 training steps" in page.text
    assert "Nothing was recorded" not in page.text
    for heading in ("Reward", "Held-out", "Identity checks", "Staleness", "Timeline", "Trajectories", "Environment"):
        assert heading in page.text
    assert {path.name for path in (finished / "figures").iterdir()} == FIGURES
    assert all(path.read_bytes().startswith(PNG) for path in (finished / "figures").iterdir())


def test_trajectories_show_turns_and_what_was_trained(finished: Path) -> None:
    shown = choose(finished / "trajectories")
    assert 2 <= len(shown) <= 3
    page = (finished / "report.html").read_text()
    assert page.count("<div class=trajectory>") == len(shown)
    sampled = re.findall(r'class="t p[0-3] v[0-3]" title="token \d+, id \d+, log-prob -?[\d.]+, probability', page)
    assert len(sampled) == sum(int(item.trajectory.loss_mask.sum()) for item in shown)
    assert page.count(', not trained"') == sum(int((item.trajectory.loss_mask == 0).sum()) for item in shown)
    assert page.count("<span class=turn>") == sum(len(item.trajectory.turns) for item in shown)


def test_a_run_records_when_each_process_worked(finished: Path) -> None:
    events = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    phases = [event for event in events if event["kind"] == "phase"]
    seen = {(phase["role"], phase["name"]) for phase in phases}
    assert {("driver", "wait"), ("driver", "evaluate"), ("engine-0", "generate"), ("engine-0", "update")} <= seen
    assert {("trainer-0", name) for name in ("verify", "train", "update", "save")} <= seen
    assert all(phase["begin_s"] <= phase["end_s"] for phase in phases)
    assert sum((p["role"], p["name"]) == ("trainer-0", "train") for p in phases) == 3


@pytest.mark.parametrize(
    "missing",
    ["metrics.jsonl", "events.jsonl", "config.toml", "environment.json", "trajectories", "checkpoints"],
)
def test_a_missing_piece_is_left_out(copied: RunFolder, missing: str) -> None:
    path = copied.root / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "Environment" in page_of(copied).text


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    page = page_of(RunFolder(tmp_path))
    assert "0 training steps" in page.text
    assert "No trajectory was saved" in page.text


def test_a_damaged_trajectory_is_passed_over(copied: RunFolder) -> None:
    for file in copied.trajectories.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert "No trajectory was saved" in page_of(copied).text


def test_without_a_tokenizer_ids_are_shown(copied: RunFolder) -> None:
    shutil.rmtree(copied.checkpoints)
    copied.config.write_text(copied.config.read_text().replace("path = ", "# path = "))
    assert "ids are shown" in page_of(copied).text


def test_a_violated_identity_is_named_and_its_text_is_escaped(copied: RunFolder) -> None:
    failure = {"t": 0.0, "kind": "failure", "code": "token_identity", "message": "<b>turn 1</b> (log: /tmp/x/y.log)"}
    with copied.events.open("a") as file:
        file.write(json.dumps(failure) + "\n")
    page = write_report(copied).read_text()
    assert "Stopped: token_identity" in page
    assert "&lt;b&gt;turn 1" in page
    assert "<span class=bad>violated</span>" in page
    assert "/tmp/x" not in page


def test_the_environment_names_versions_and_no_place(copied: RunFolder) -> None:
    known = environment()
    assert known["packages"]["torch"]
    assert "/" not in known["cpu"]
    page = page_of(copied).text
    assert known["python"] in page
    assert f"torch {known['packages']['torch']}" in page


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ('path = "/srv/models/smollm2"', 'path = "…/smollm2"'),
        ("ratio 3/4, file a/b, http://127.0.0.1/v1/x", "ratio 3/4, file a/b, http://127.0.0.1/v1/x"),
    ],
)
def test_paths_of_the_machine_are_cut(text: str, short: str) -> None:
    assert shortened(text) == short


def test_held_out_sets_and_operations_are_compared() -> None:
    names = {"heldout": 0.5, "heldout/numbers": 0.5, "heldout/wording": 0.25, "heldout/numbers/+": 0.75}
    rows = [
        {"step": 0, **{f"{name}/success": value / 2 for name, value in names.items()}, **questions(names)},
        {"step": 1, "reward/success": 0.1},
        {"step": 2, **{f"{name}/success": value for name, value in names.items()}, **questions(names)},
    ]
    found = comparisons(rows)
    assert [item.label for item in found] == ["numbers", "wording", "numbers: +"]
    assert found[0].before == Share(4, 16)
    assert found[2].after == Share(12, 16)


def questions(names: dict[str, float]) -> dict[str, int]:
    return {f"{name}/questions": 16 for name in names}


def test_a_run_without_named_sets_has_one_comparison() -> None:
    [only] = comparisons([{"step": 0, "heldout/success": 0.5, "heldout/questions": 4}])
    assert (only.label, only.before, only.after) == ("held out", Share(2, 4), None)


def test_the_interval_is_wilsons() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 0 of 20
    assert Share(81, 263).interval() == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert Share(0, 20).interval() == pytest.approx((0.0, 0.1611), abs=5e-5)


@given(st.integers(0, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_share(counts: tuple[int, int]) -> None:
    share = Share(*counts)
    low, high = share.interval()
    assert 0.0 <= low <= high <= 1.0
    assert low - 1e-12 <= share.value <= high + 1e-12


def test_a_figure_takes_the_colours_of_the_page() -> None:
    svg = '<?xml version="1.0"?>\n<svg><g id="a" style="fill: #1d2430"/><use href="#a"/><p clip-path="url(#a)"/></svg>'
    assert inline(svg, "One two") == (
        '<svg role="img" aria-label="One two"><g id="one-two-a" style="fill: var(--ink)"/><use href="#one-two-a"/>'
        '<p clip-path="url(#one-two-a)"/></svg>'
    )


def test_writing_a_report_again_changes_nothing(finished: Path) -> None:
    first = (finished / "report.html").read_text()
    assert write_report(RunFolder(finished)).read_text() == first
