"""What all tests of the workspace share."""

from __future__ import annotations

import os

from hypothesis import settings

# How long an example takes says more about the machine than about the code; tests have their own time limit.
settings.register_profile("miles", deadline=None)
settings.load_profile("miles")

# One thread a process, before torch is imported: several processes with two threads each collapse on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ("tools.verifying",)
