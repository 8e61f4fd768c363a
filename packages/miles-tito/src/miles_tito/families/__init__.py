"""Chat families: how a conversation becomes text, which roles may be appended, and what follows a sampled turn."""

from .base import Family, FamilyOptions
from .registry import family_names, load_family

__all__ = ["Family", "FamilyOptions", "family_names", "load_family"]
