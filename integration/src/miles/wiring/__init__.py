"""Adapters of a few lines between the packages: each satisfies a protocol of one with the public API of another."""
