"""Checks and scripts of the workspace. Standard library only, so that they run before anything is installed."""
