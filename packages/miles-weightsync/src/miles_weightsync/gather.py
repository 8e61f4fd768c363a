"""Shards to full tensors: the layout rules of tensor, expert and pipeline parallel trainers, as pure functions.

Shapes: R rows (dimension 0 of the full tensor), G query groups, D head size, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from miles_weightsync.errors import LayoutError
from miles_weightsync.names import is_routed_expert

Array = NDArray[Any]
T = TypeVar("T")

_EXPERT_ID = re.compile(r"^(.*weight)(\d+)$", re.DOTALL)


def merge_tp(shards: Sequence[Array], partition_dim: int, *, stride: int = 1, duplicated: bool = False) -> Array:
    """The full tensor from one shard a rank.

    Every shard is split in `stride` chunks along `partition_dim`, chunks are ordered by chunk then rank (gated layers
    store `[gate_r; up_r]` with stride 2). Duplicated tensors are rank 0's. Raises LayoutError (code `shape`).
    """
    if duplicated:
        return shards[0]
    if len({shard.shape for shard in shards}) != 1:
        raise LayoutError("shape", f"shards differ in shape: {[shard.shape for shard in shards]}")
    _require_divisible(shards[0].shape[partition_dim], stride, "a shard's partitioned dimension", "stride")
    chunks = [np.split(shard, stride, axis=partition_dim) for shard in shards]
    return np.concatenate([rank[c] for c in range(stride) for rank in chunks], axis=partition_dim)


def shard_group(name: str) -> Literal["tp", "expert_tp"]:
    """The process group that holds the shards of a parameter, decided by its place in the model."""
    return "expert_tp" if is_routed_expert(name) else "tp"


def gather_ep(ranks: Sequence[Mapping[str, T]], num_experts: int, ep_size: int) -> dict[str, T]:
    """Local expert tensors of each rank under their global names: global id = local id + rank * experts per rank.

    The number after the last `weight` of a name is its local id. Raises LayoutError (codes `shape`, `count`).
    """
    per_rank = _require_divisible(num_experts, ep_size, "the number of experts", "the expert-parallel size")
    counts = [len(rank) for rank in ranks]
    if len(set(counts)) > 1:
        raise LayoutError("count", f"expert-parallel ranks hold different numbers of tensors: {counts}")
    return {
        _global_name(name, number * per_rank): value
        for number, rank in enumerate(ranks)
        for name, value in rank.items()
    }


def _global_name(name: str, first_expert: int) -> str:
    match = _EXPERT_ID.match(name)
    if match is None:
        raise LayoutError("shape", f"{name} does not end in an expert number", [name])
    return f"{match[1]}{int(match[2]) + first_expert}"


def split_qkv(
    qkv_RH: Array, *, num_query_groups: int, num_attention_heads: int, head_dim: int
) -> tuple[Array, Array, Array]:
    """Query, key and value from a fused tensor `[G, heads a group + 2, D, …]` flattened to R rows; biases likewise.

    Raises LayoutError (code `shape`) when the rows do not fit.
    """
    per_group = _require_divisible(num_attention_heads, num_query_groups, "attention heads", "query groups")
    rows = num_query_groups * (per_group + 2) * head_dim
    if qkv_RH.shape[0] != rows:
        raise LayoutError("shape", f"a fused qkv of {num_query_groups} groups needs {rows} rows, not {qkv_RH.shape[0]}")
    rest = qkv_RH.shape[1:]
    grouped = qkv_RH.reshape(num_query_groups, per_group + 2, head_dim, *rest)
    query, key, value = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def split_gate_up(gate_up_RH: Array) -> tuple[Array, Array]:
    """The halves of dimension 0. Raises LayoutError (code `shape`) for an odd number of rows."""
    half = _require_divisible(gate_up_RH.shape[0], 2, "rows of a fused gate and up", "2")
    return gate_up_RH[:half], gate_up_RH[half:]


def global_layers(
    local_layers: Sequence[int],
    *,
    num_layers: int,
    pp: int,
    pp_rank: int,
    vp: int = 1,
    vp_stage: int = 0,
    layers_per_chunk: Sequence[int] | None = None,
) -> list[int]:
    """Global ids of a pipeline stage's layers.

    Chunk `vp_stage * pp + pp_rank` starts after the layers of the chunks before it.
    Raises LayoutError (code `shape`) when the layers do not divide and no split is given.
    """
    if layers_per_chunk is None:
        layers_per_chunk = [_require_divisible(num_layers, pp * vp, "layers", "pipeline chunks")] * (pp * vp)
    elif sum(layers_per_chunk) != num_layers:
        raise LayoutError("shape", f"chunks of {list(layers_per_chunk)} layers do not make {num_layers}")
    first = sum(layers_per_chunk[: vp_stage * pp + pp_rank])
    return [first + layer for layer in local_layers]


def cut_vocab(rows_RH: Array, vocab_size: int) -> Array:
    """The first `vocab_size` rows, without padding. Raises LayoutError (code `shape`) when there are fewer."""
    if rows_RH.shape[0] < vocab_size:
        raise LayoutError("shape", f"{rows_RH.shape[0]} rows cannot hold a vocabulary of {vocab_size}")
    return rows_RH[:vocab_size]


def embeddings_to_send(*, model_ties: bool, engine_ties: bool) -> list[str]:
    """Which of embedding and head are sent: the head is left out only when both sides tie it to the embedding."""
    return ["embed_tokens"] if model_ties and engine_ties else ["embed_tokens", "lm_head"]


def stage_owners(stages: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """The lowest pipeline stage that holds each tensor, from the digests of each stage.

    Raises LayoutError (code `replica_mismatch`) with the names whose copies differ.
    """
    owners: dict[str, int] = {}
    differing = set()
    for number, digests in enumerate(stages):
        for name, digest in digests.items():
            owner = owners.setdefault(name, number)
            if stages[owner][name] != digest:
                differing.add(name)
    if differing:
        names = sorted(differing)
        raise LayoutError("replica_mismatch", f"copies on several stages differ: {', '.join(names)}", names)
    return owners


def _require_divisible(count: int, parts: int, what: str, by: str) -> int:
    if parts < 1 or count % parts:
        raise LayoutError("shape", f"{what} ({count}) cannot be divided by {by} ({parts})")
    return count // parts
