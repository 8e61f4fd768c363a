"""The report of a run: `report.html`, one self-contained page, and its figures as PNG files in `figures/`."""

from __future__ import annotations

from miles.report.page import write_report

__all__ = ["write_report"]
