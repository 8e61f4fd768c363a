from __future__ import annotations

import pytest

from tools.hygiene import findings, findings_in


def test_tracked_files_name_no_machine_and_no_unknown_host():
    assert list(findings()) == []


# The samples are put together here so that this file stays clean itself.
@pytest.mark.parametrize(
    "line",
    [
        "/" + "work/main/x",
        "path = '/" + "root/.cache'",
        "see https:" + "//index.internal-registry.io/simple",
        "(/" + "opt/wheels)",
    ],
)
def test_machine_folders_and_unknown_hosts_are_found(line: str):
    assert [number for number, _ in findings_in(f"fine\n{line}\n")] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "http://127.0.0.1:8000/v1",
        "http://localhost/x",
        "https://github.com/NVIDIA/TransformerEngine",
        "https://engine.example.com/generate",
        "f'http://{host}:{port}/health'",
        "packages/root/x and ../work/x and a/opt/b",
    ],
)
def test_loopback_known_hosts_and_relative_paths_are_fine(line: str):
    assert list(findings_in(line)) == []
