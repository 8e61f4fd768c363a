"""Backends: how a model's forward, backward and optimizer step run over ranks."""
