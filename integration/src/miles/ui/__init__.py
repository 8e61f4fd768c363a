"""What a run shows while it goes: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

from miles.ui.live import LiveView
from miles.ui.plain import PlainLines
from miles.ui.snapshot import Snapshot
from miles.ui.view import Silent, View, choose_view

__all__ = ["LiveView", "PlainLines", "Silent", "Snapshot", "View", "choose_view"]
