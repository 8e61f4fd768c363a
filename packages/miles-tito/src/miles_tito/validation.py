"""What makes a trajectory v1 valid. The first contradiction is raised as a `TrajectoryError` that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from .protocols import Span
from .trajectory import (
    FINISH_KINDS,
    NOT_SAMPLED,
    STATUSES,
    RoutedExperts,
    Trajectory,
    Turn,
    expert_dtype,
    require,
    span_values,
)

HIGHEST_VERSION = 2**63 - 1
"""Versions are int64."""

_TURN_TYPES: Mapping[str, type] = {
    "prompt_length completion_length cached_tokens version_start version_end expert_row_start": int,
    "record_digest engine_id": str,
    "started_s ended_s": float,
}


def validate_trajectory(trajectory: Trajectory) -> None:
    """Raise `TrajectoryError` on the first field of `trajectory` that contradicts the format or another field."""
    _check_types(trajectory)
    _check_arrays(trajectory)
    _check_scalars(trajectory)
    require_spans("weight_version_spans", trajectory.weight_version_spans, trajectory.n_tokens, lowest=NOT_SAMPLED)
    _check_versions(trajectory)
    _check_turns(trajectory)
    if trajectory.routed_experts is not None:
        _check_experts(trajectory.routed_experts, max(trajectory.n_tokens - 1, 0))


def _check_types(trajectory: Trajectory) -> None:
    _require_types("trajectory", trajectory, {"trajectory_id session_id family": str, "temperature": float})
    reward = trajectory.reward
    require(reward is None or _is(reward, float), f"reward is {reward!r}, not a number")
    require(isinstance(trajectory.metadata, Mapping), "metadata is not an object")
    objects = (*trajectory.messages, *(trajectory.tools or ()))
    require(all(isinstance(item, Mapping) for item in objects), "messages and tools must hold objects")
    for index, turn in enumerate(trajectory.turns):
        _require_types(f"turns[{index}]", turn, _TURN_TYPES)
        digest = turn.expert_digest
        require(digest is None or isinstance(digest, str), f"turns[{index}].expert_digest is {digest!r}, not text")
    experts = trajectory.routed_experts
    if experts is not None:
        _require_types("routed_experts", experts, {"num_experts top_k": int})
        require(all(_is(layer, int) for layer in experts.layers), "routed_experts.layers must hold integers")


def _require_types(where: str, owner: object, types: Mapping[str, type]) -> None:
    for names, kind in types.items():
        for name in names.split():
            value = getattr(owner, name)
            require(_is(value, kind), f"{where}.{name} is {value!r}, expected {kind.__name__}")


def _is(value: object, kind: type) -> bool:
    """Whether a value has a type as JSON means it: an integer is a number, a truth value is neither."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def require_spans(name: str, spans: Sequence[Span], length: int, *, lowest: int = 0) -> None:
    """Spans ascend, stay below `length`, begin at 0 when there is anything to cover, and name versions >= `lowest`."""
    starts = [start for start, _ in spans]
    covered = (not length and not spans) or bool(length and spans and starts[0] == 0)
    require(covered, f"{name} {_short(spans)} must begin at 0 and be empty exactly when its {length} places are none")
    ascending = all(a < b for a, b in pairwise(starts)) and all(s < length for s in starts)
    require(ascending, f"{name} {_short(spans)}: starts must ascend below {length}")
    require(
        all(lowest <= v <= HIGHEST_VERSION for _, v in spans),
        f"{name} {_short(spans)}: versions must lie in {lowest} … {HIGHEST_VERSION}",
    )


def _check_arrays(trajectory: Trajectory) -> None:
    length = len(trajectory.token_ids)
    for name, dtype in (("token_ids", np.int32), ("loss_mask", np.uint8), ("logprobs", np.float32)):
        array = getattr(trajectory, name)
        require(
            array.dtype == dtype and array.shape == (length,),
            f"{name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)}[{length}]",
        )
    require(bool((trajectory.token_ids >= 0).all()), "token_ids holds a negative id")
    require(bool((trajectory.loss_mask <= 1).all()), f"loss_mask holds {int(trajectory.loss_mask.max(initial=0))}")
    require(not bool(np.isnan(trajectory.logprobs).any()), "logprobs holds NaN")
    stray = np.flatnonzero((trajectory.logprobs != 0) & (trajectory.loss_mask == 0))
    require(
        not len(stray),
        f"logprobs[{stray[:1]}] is not 0 although loss_mask is: only sampled tokens have a log-probability",
    )


def _check_scalars(trajectory: Trajectory) -> None:
    require(trajectory.status in STATUSES, f"status {trajectory.status!r} is none of {STATUSES}")
    reward = trajectory.reward
    require(reward is None or math.isfinite(reward), f"reward {reward} is not finite")
    temperature = trajectory.temperature
    require(math.isfinite(temperature) and temperature > 0, f"temperature {temperature} must be above 0")
    require(bool(trajectory.trajectory_id), "trajectory_id is empty")


def _check_versions(trajectory: Trajectory) -> None:
    versions = span_values(trajectory.weight_version_spans, trajectory.n_tokens)
    unknown = np.flatnonzero((versions == NOT_SAMPLED) & (trajectory.loss_mask == 1))
    require(
        not len(unknown),
        f"weight_version_spans give no version to sampled token {unknown[:1]}: a trajectory without versions is "
        "invalid",
    )


def _check_turns(trajectory: Trajectory) -> None:
    require(bool(trajectory.turns), "turns is empty: a trajectory has at least one generation")
    end = 0
    for index, turn in enumerate(trajectory.turns):
        require(
            end <= turn.prompt_length and turn.completion_length >= 0 and turn.end <= trajectory.n_tokens,
            f"turns[{index}] covers [{turn.prompt_length}, {turn.end}) which must lie in [{end}, "
            f"{trajectory.n_tokens}]",
        )
        end = turn.end
        _check_turn(index, turn)
    require(end == trajectory.n_tokens, f"{trajectory.n_tokens - end} tokens follow the last turn's output")


def _check_turn(index: int, turn: Turn) -> None:
    name = f"turns[{index}]"
    require(
        turn.finish_reason in FINISH_KINDS, f"{name}.finish_reason {turn.finish_reason!r} is none of {FINISH_KINDS}"
    )
    trimmed, rows = turn.trimmed_logprobs, turn.trimmed_expert_rows
    require(
        trimmed.ndim == 1 and trimmed.dtype == np.float32 and not bool(np.isnan(trimmed).any()),
        f"{name}.trimmed_logprobs is {trimmed.dtype}{list(trimmed.shape)}, expected float32 of one axis without NaN",
    )
    require(rows is None or rows.ndim == 3, f"{name}.trimmed_expert_rows must have three axes")
    n_output = turn.completion_length + len(turn.trimmed_ids)
    require_spans(f"{name}.version_spans", turn.version_spans, n_output)
    spans = turn.expert_version_spans
    require_spans(f"{name}.expert_version_spans", spans, spans[-1][0] + 1 if spans else 0)
    require(
        len(turn.trimmed_ids) == len(turn.trimmed_logprobs),
        f"{name}: {len(turn.trimmed_ids)} trimmed_ids but {len(turn.trimmed_logprobs)} trimmed_logprobs",
    )
    first, last = (turn.version_spans[0][1], turn.version_spans[-1][1]) if turn.version_spans else (None, None)
    agrees = first is None or (turn.version_start, turn.version_end) == (first, last)
    require(
        agrees, f"{name}: version_start {turn.version_start}, version_end {turn.version_end} against {first}, {last}"
    )


def _check_experts(experts: RoutedExperts, n_rows: int) -> None:
    layers = experts.layers
    ascending = all(a < b for a, b in pairwise(layers)) and all(layer >= 0 for layer in layers)
    require(ascending, f"routed_experts.layers {list(layers)} must ascend from 0: they are global indices")
    dtype = expert_dtype(experts.num_experts)
    missing = sum(count for _, count in experts.missing_spans)
    expected = (n_rows - missing, len(experts.layers), experts.top_k)
    require(
        experts.rows.dtype == dtype and experts.rows.shape == expected,
        f"routed_experts.rows is {experts.rows.dtype}{list(experts.rows.shape)}, expected {dtype}{list(expected)}",
    )
    end = 0
    for start, count in experts.missing_spans:
        ordered = start >= end and count > 0 and start + count <= n_rows
        require(ordered, f"routed_experts.missing_spans ({start}, {count}) overlaps, is empty or leaves [0, {n_rows})")
        end = start + count
    highest = int(experts.rows.max(initial=0))
    require(highest < experts.num_experts, f"routed_experts names expert {highest} of {experts.num_experts}")
    require_spans("routed_experts.version_spans", experts.version_spans, n_rows, lowest=NOT_SAMPLED)


def _short(spans: Sequence[Span]) -> str:
    return str(list(spans)) if len(spans) <= 6 else f"{list(spans[:6])} … ({len(spans)} in all)"
