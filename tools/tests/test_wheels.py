from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.wheels import WheelError, check_contents, require_own
from tools.workspace import INTEGRATION, LEAVES

TITO = LEAVES[0]
WANTED = (
    "miles_tito/__init__.py",
    "miles_tito/py.typed",
    "miles_tito-0.1.0.dist-info/METADATA",
    "miles_tito-0.1.0.dist-info/licenses/LICENSE",
)


def wheel_with(folder: Path, *names: str) -> Path:
    wheel = folder / "miles_tito-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return wheel


def item(name: str, url: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "download_info": {"url": url}}


def test_a_wheel_ships_types_and_licence(tmp_path: Path):
    check_contents(TITO, wheel_with(tmp_path, *WANTED))


@pytest.mark.parametrize("absent", [name for name in WANTED if "METADATA" not in name])
def test_a_wheel_without_one_of_them_is_refused(tmp_path: Path, absent: str):
    with pytest.raises(WheelError, match="missing"):
        check_contents(TITO, wheel_with(tmp_path, *(name for name in WANTED if name != absent)))


def test_a_wheel_with_foreign_folders_is_refused(tmp_path: Path):
    with pytest.raises(WheelError, match=r"not its own \['tests'\]"):
        check_contents(TITO, wheel_with(tmp_path, *WANTED, "tests/test_x.py"))


def test_own_names_come_from_the_folder(tmp_path: Path):
    require_own(TITO, item("miles-tito", (tmp_path / "miles_tito-0.1.0.whl").as_uri()), tmp_path)
    require_own(TITO, item("httpx", "https://index.example.com/httpx.whl"), tmp_path)
    with pytest.raises(WheelError, match="came from"):
        require_own(TITO, item("miles-tito", "https://index.example.com/miles_tito-9.whl"), tmp_path)
    with pytest.raises(WheelError, match="came from"):
        require_own(INTEGRATION, item("miles-tito", (tmp_path.parent / "miles_tito-9.whl").as_uri()), tmp_path)


def test_a_leaf_may_not_bring_another(tmp_path: Path):
    with pytest.raises(WheelError, match="a leaf needs no other leaf"):
        require_own(TITO, item("miles-quant", (tmp_path / "miles_quant-0.1.0.whl").as_uri()), tmp_path)
