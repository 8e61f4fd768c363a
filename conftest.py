"""What all tests of the workspace share."""

from __future__ import annotations

pytest_plugins = ("tools.verifying",)
