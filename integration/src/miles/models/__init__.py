"""Pretrained models that Miles can fetch and convert by itself."""
