from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import miles_diffusion

README = Path(__file__).resolve().parents[1] / "README.md"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_every_public_name_resolves():
    for name in miles_diffusion.__all__:
        assert getattr(miles_diffusion, name).__name__ == name
    assert list(miles_diffusion.__all__) == sorted(miles_diffusion.__all__)
    assert not hasattr(miles_diffusion, "sde_step")


def test_the_readme_example_runs():
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


def test_help_and_import_do_not_load_torch():
    program = (
        "import sys, miles_diffusion\n"
        "from miles_diffusion.cli import app\n"
        "app(['--help'], result_action='return_value')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert "sigmas" in done.stdout


def test_the_command_prints_the_schedule():
    done = run("-m", "miles_diffusion.cli", "sigmas", "4", "--shift", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2] == "   2  sigma 0.750000000  dt -0.250000000"
    assert lines[-1] == " end  sigma 0.000000000"


def test_a_wrong_schedule_is_one_message():
    done = run("-m", "miles_diffusion.cli", "sigmas", "0")
    assert done.returncode == 2
    assert done.stderr == "miles-diffusion: num_steps is 0: a schedule has at least one step\n"
