"""The record digest: one number a turn over what the engine consumed and produced (`contracts/README.md`)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import ExpertIdentityError, TokenIdentityError
from .protocols import ExpertRows, Span
from .trajectory import NOT_SAMPLED, RoutedExperts, Trajectory, Turn, span_values

Ids = Sequence[int] | NDArray[np.int32]
Floats = Sequence[float] | NDArray[np.float32]


def record_digest(
    input_ids: Ids,
    output_ids: Ids,
    logprobs: Floats,
    version_spans: Sequence[Span],
    experts: ExpertRows | None = None,
) -> str:
    """Digest of one turn: 32 hex digits of xxh3-128.

    `logprobs` has one float32 for each of `output_ids`; `version_spans` count the output from 0; `experts` are the
    rows of this reply, None when none are recorded.
    """
    digest = xxhash.xxh3_128(b"MRD1")
    for piece in _token_bytes(input_ids, output_ids, logprobs, version_spans):
        digest.update(piece)
    for piece in _expert_bytes(experts):
        digest.update(piece)
    return digest.hexdigest()


def expert_digest(experts: ExpertRows) -> str:
    """Digest of the expert rows of one reply alone: it tells an expert error from a token error."""
    digest = xxhash.xxh3_128(b"MED1")
    for piece in _expert_bytes(experts):
        digest.update(piece)
    return digest.hexdigest()


def check_record(where: str, expected: tuple[str, str | None], found: tuple[str, str | None]) -> None:
    """Compare (record digest, expert digest) pairs. A differing expert digest makes it an `ExpertIdentityError`."""
    if expected[1] is not None and found[1] is not None and expected[1] != found[1]:
        raise ExpertIdentityError(
            f"{where}: the expert rows have digest {found[1]}, the engine recorded {expected[1]}; the routes were "
            "changed "
            "after they were recorded, so this work is dropped"
        )
    if expected[0] != found[0]:
        raise TokenIdentityError(
            f"{where}: the tokens have record digest {found[0]}, the engine recorded {expected[0]}; ids, "
            "log-probabilities or "
            "versions were changed after they were recorded, so this work is dropped"
        )


def verify_records(trajectory: Trajectory) -> None:
    """Recompute the digest of every turn from the arrays of `trajectory`.

    Raises `TrajectoryError` when fields contradict each other, `TokenIdentityError` or `ExpertIdentityError` naming the
    trajectory, the turn and both digests when the arrays are not what was recorded.
    """
    trajectory.validate()
    _verify_cover(trajectory)
    _verify_row_cover(trajectory)
    for index, turn in enumerate(trajectory.turns):
        experts = _rows_of_turn(trajectory, turn)
        prompt, end = turn.prompt_length, turn.end
        found = record_digest(
            trajectory.token_ids[:prompt],
            np.concatenate([trajectory.token_ids[prompt:end], np.asarray(turn.trimmed_ids, np.int32)]),
            np.concatenate([trajectory.logprobs[prompt:end], turn.trimmed_logprobs]),
            turn.version_spans,
            experts,
        )
        where = f"trajectory {trajectory.trajectory_id}, turn {index}"
        found_experts = expert_digest(experts) if experts is not None else None
        check_record(where, (turn.record_digest, turn.expert_digest), (found, found_experts))


def _verify_cover(trajectory: Trajectory) -> None:
    """Loss mask and versions are those of the turns: sampled tokens are exactly the outputs of the turns."""
    mask = np.zeros(trajectory.n_tokens, np.uint8)
    versions = np.full(trajectory.n_tokens, NOT_SAMPLED, np.int64)
    for turn in trajectory.turns:
        mask[turn.prompt_length : turn.end] = 1
        versions[turn.prompt_length : turn.end] = span_values(turn.version_spans, turn.completion_length)
    where = f"trajectory {trajectory.trajectory_id}"
    for name, found, expected in (
        ("loss_mask", trajectory.loss_mask, mask),
        ("weight_version_spans", span_values(trajectory.weight_version_spans, trajectory.n_tokens), versions),
    ):
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            at = int(wrong[0])
            raise TokenIdentityError(f"{where}: {name} at token {at} is {found[at]}, its turn says {expected[at]}")


def _verify_row_cover(trajectory: Trajectory) -> None:
    """Every expert row held is in the record of a turn, and its version is the one recorded: no row is replayed that no
    digest covers."""
    experts = trajectory.routed_experts
    if experts is None:
        return
    n_rows = max(trajectory.n_tokens - 1, 0)
    covered = np.zeros(n_rows, np.bool_)
    versions = np.full(n_rows, NOT_SAMPLED, np.int64)
    where = f"trajectory {trajectory.trajectory_id}"
    for turn in trajectory.turns:
        start, end = turn.expert_row_start, _kept_row_end(turn)
        if turn.expert_digest is None or end <= start:
            continue
        if start < 0 or end > n_rows:
            raise ExpertIdentityError(f"{where}: a turn's record has rows [{start}, {end}) of {n_rows}")
        covered[start:end] = True
        versions[start:end] = span_values(turn.expert_version_spans, end - start)
    stray = np.flatnonzero(experts.present(n_rows) & ~covered)
    if len(stray):
        raise ExpertIdentityError(f"{where}: expert row {stray[0]} is in no turn's record: nothing says who routed it")
    found = span_values(experts.version_spans, n_rows)
    wrong = np.flatnonzero((found != versions) & experts.present(n_rows))
    if len(wrong):
        at = int(wrong[0])
        raise ExpertIdentityError(f"{where}: expert row {at} has version {found[at]}, its turn says {versions[at]}")


def _kept_row_end(turn: Turn) -> int:
    """Index after the last row of a turn's reply that the trajectory holds."""
    trimmed = turn.trimmed_expert_rows
    return turn.end + len(turn.trimmed_ids) - 1 - (0 if trimmed is None else len(trimmed))


def _rows_of_turn(trajectory: Trajectory, turn: Turn) -> ExpertRows | None:
    """The expert rows of a turn's reply, taken back from the rows of the trajectory."""
    experts = trajectory.routed_experts
    if turn.expert_digest is None:
        return None
    if experts is None:
        raise ExpertIdentityError(
            f"trajectory {trajectory.trajectory_id}: a turn has expert digest {turn.expert_digest} but there are no "
            "rows"
        )
    trimmed = turn.trimmed_expert_rows
    end = max(_kept_row_end(turn), turn.expert_row_start)
    rows = _held_rows(trajectory, experts, turn.expert_row_start, end)
    if trimmed is not None:
        rows = np.concatenate([rows, trimmed.astype(np.int32)])
    return ExpertRows(rows, turn.expert_row_start, turn.expert_version_spans)


def _held_rows(trajectory: Trajectory, experts: RoutedExperts, start: int, end: int) -> NDArray[np.int32]:
    held = experts.present(max(trajectory.n_tokens - 1, 0))
    if not held[start:end].all():
        raise ExpertIdentityError(
            f"trajectory {trajectory.trajectory_id}: rows [{start}, {end}) were recorded, but some of them are missing"
        )
    first = int(held[:start].sum())
    return experts.rows[first : first + end - start].astype(np.int32)


def _token_bytes(input_ids: Ids, output_ids: Ids, logprobs: Floats, spans: Sequence[Span]) -> Iterable[bytes]:
    if len(output_ids) != len(logprobs):
        raise TokenIdentityError(f"{len(output_ids)} output ids but {len(logprobs)} log-probabilities")
    yield struct.pack("<I", len(input_ids))
    yield np.asarray(input_ids, dtype="<i4").tobytes()
    yield struct.pack("<I", len(output_ids))
    yield np.asarray(output_ids, dtype="<i4").tobytes()
    yield np.asarray(logprobs, dtype="<f4").tobytes()
    yield _span_bytes(spans)


def _expert_bytes(experts: ExpertRows | None) -> Iterable[bytes]:
    if experts is None:
        yield struct.pack("<5I", 0, 0, 0, 0, 0)
        return
    n_rows, layers, top_k = experts.rows.shape
    yield struct.pack("<4I", experts.row_start, n_rows, layers, top_k)
    yield np.ascontiguousarray(experts.rows, dtype="<i4").tobytes()
    yield _span_bytes(experts.version_spans)


def _span_bytes(spans: Sequence[Span]) -> bytes:
    return struct.pack("<I", len(spans)) + np.asarray(spans, dtype="<i8").reshape(-1, 2).tobytes()
