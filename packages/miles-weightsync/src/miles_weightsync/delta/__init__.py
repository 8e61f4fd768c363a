"""Deltas between versions: byte encodings, chains of them, and the directories they are published in."""

from miles_weightsync.delta.chain import Delta, apply_chain, changed_names
from miles_weightsync.delta.codec import apply_delta, check_encodable, encode_delta, patch
from miles_weightsync.delta.compression import compress, decompress
from miles_weightsync.delta.index import DirectoryEntry, VersionIndex, check_base, validate_index
from miles_weightsync.delta.pull import PublishedVersion, deletable_versions, plan_pull

__all__ = [
    "Delta",
    "DirectoryEntry",
    "PublishedVersion",
    "VersionIndex",
    "apply_chain",
    "apply_delta",
    "changed_names",
    "check_base",
    "check_encodable",
    "compress",
    "decompress",
    "deletable_versions",
    "encode_delta",
    "patch",
    "plan_pull",
    "validate_index",
]
