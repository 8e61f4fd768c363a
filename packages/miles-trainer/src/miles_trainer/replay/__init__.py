"""Routing replay (R3): records of routed experts, and routers that follow them."""
