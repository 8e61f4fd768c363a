"""The record digest: golden bytes, and every change of a stored array is seen."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from miles_tito import (
    ExpertIdentityError,
    ExpertRows,
    IdentityViolation,
    TokenIdentityError,
    Trajectory,
    TrajectoryError,
    expert_digest,
    loads,
    record_digest,
    verify_records,
)


def experts_of(case: dict[str, Any]) -> ExpertRows | None:
    given = case["experts"]
    if given is None:
        return None
    rows = np.asarray(given["rows"], np.int32)
    rows = rows if rows.ndim == 3 else rows.reshape(0, 2, 2)
    return ExpertRows(rows, given["row_start"], tuple(tuple(span) for span in given["version_spans"]))


def cases(contract: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((contract / "record_digest.json").read_text())["cases"]
    return loaded


@pytest.fixture
def trajectory(contract: Path) -> Trajectory:
    return loads((contract / "trajectory.safetensors").read_bytes())


def test_digests_match_the_golden_file(contract: Path) -> None:
    for case in cases(contract):
        experts = experts_of(case)
        spans = tuple(tuple(span) for span in case["version_spans"])
        found = record_digest(case["input_ids"], case["output_ids"], case["logprobs"], spans, experts)
        assert found == case["record_digest"], case["id"]
        assert (expert_digest(experts) if experts else None) == case["expert_digest"], case["id"]
    assert len(cases(contract)) >= 6


def test_bytes_are_those_of_the_contract() -> None:
    experts = ExpertRows(np.asarray([[[1, 2]], [[3, 4]]], np.int32), 5, ((0, 7), (1, 8)))
    tail = struct.pack("<4I4iI4q", 5, 2, 1, 2, 1, 2, 3, 4, 2, 0, 7, 1, 8)
    body = b"MRD1" + struct.pack("<I3iI2i2fI2q", 3, 9, 8, 7, 2, 6, 5, -0.5, -1.5, 1, 0, 7) + tail
    assert record_digest([9, 8, 7], [6, 5], [-0.5, -1.5], [(0, 7)], experts) == xxhash.xxh3_128(body).hexdigest()
    assert expert_digest(experts) == xxhash.xxh3_128(b"MED1" + tail).hexdigest()
    empty = b"MRD1" + struct.pack("<9I", 0, 0, 0, 0, 0, 0, 0, 0, 0)[: 4 * 8]
    assert record_digest([], [], [], [], None) == xxhash.xxh3_128(empty).hexdigest()


def test_an_untouched_trajectory_passes(trajectory: Trajectory) -> None:
    verify_records(trajectory)


@pytest.mark.parametrize("at", range(14))
def test_any_changed_token_id_is_a_token_identity_error(trajectory: Trajectory, at: int) -> None:
    ids = trajectory.token_ids.copy()
    ids[at] += 1
    with pytest.raises(TokenIdentityError, match=r"golden-0, turn [01].*digest") as caught:
        verify_records(replace(trajectory, token_ids=ids))
    assert caught.value.code == "token_identity"


def test_a_changed_logprob_is_a_token_identity_error(trajectory: Trajectory) -> None:
    logprobs = trajectory.logprobs.copy()
    logprobs[5] = np.nextafter(logprobs[5], np.float32(0))
    with pytest.raises(TokenIdentityError):
        verify_records(replace(trajectory, logprobs=logprobs))


def test_two_swapped_experts_are_an_expert_identity_error(trajectory: Trajectory) -> None:
    assert trajectory.routed_experts is not None
    for row in (0, 6, 7, 12):
        rows = trajectory.routed_experts.rows.copy()
        rows[row, 1, [0, 1]] = rows[row, 1, [1, 0]]
        if (rows == trajectory.routed_experts.rows).all():
            continue
        with pytest.raises(ExpertIdentityError, match="digest") as caught:
            verify_records(replace(trajectory, routed_experts=replace(trajectory.routed_experts, rows=rows)))
        assert caught.value.code == "expert_identity"


def test_dropped_expert_rows_are_an_expert_identity_error(trajectory: Trajectory) -> None:
    assert trajectory.routed_experts is not None
    cut = replace(trajectory.routed_experts, rows=trajectory.routed_experts.rows[:-1], missing_spans=((12, 1),))
    with pytest.raises(ExpertIdentityError, match="missing"):
        verify_records(replace(trajectory, routed_experts=cut))
    with pytest.raises(ExpertIdentityError, match="no rows"):
        verify_records(replace(trajectory, routed_experts=None))


def test_a_version_label_off_by_one_is_a_token_identity_error(trajectory: Trajectory) -> None:
    turn = replace(trajectory.turns[0], version_spans=((0, 4),), version_start=4, version_end=4)
    spans = ((0, -1), (4, 4), (8, -1), (12, 3), (13, 4))
    with pytest.raises(TokenIdentityError, match="turn 0"):
        verify_records(replace(trajectory, turns=(turn, trajectory.turns[1]), weight_version_spans=spans))


def test_mask_and_versions_must_be_those_of_the_turns(trajectory: Trajectory) -> None:
    mask = trajectory.loss_mask.copy()
    mask[9] = 1
    spans = ((0, -1), (4, 3), (8, -1), (9, 3), (10, -1), (12, 3), (13, 4))
    with pytest.raises(TokenIdentityError, match="loss_mask at token 9"):
        verify_records(replace(trajectory, loss_mask=mask, weight_version_spans=spans))
    wrong = ((0, -1), (4, 2), (8, -1), (12, 3), (13, 4))
    with pytest.raises(TokenIdentityError, match="weight_version_spans at token 4"):
        verify_records(replace(trajectory, weight_version_spans=wrong))


def test_an_expert_row_that_no_turn_recorded_is_an_expert_identity_error(trajectory: Trajectory) -> None:
    """Without its digest a turn's rows would be replayed unchecked."""
    experts = trajectory.routed_experts
    assert experts is not None
    last = trajectory.turns[-1]
    bare = replace(
        last,
        expert_digest=None,
        expert_version_spans=(),
        record_digest=record_digest(
            trajectory.token_ids[: last.prompt_length],
            [*trajectory.token_ids[last.prompt_length : last.end], *last.trimmed_ids],
            [*trajectory.logprobs[last.prompt_length : last.end], *last.trimmed_logprobs],
            last.version_spans,
        ),
    )
    with pytest.raises(ExpertIdentityError, match="in no turn's record"):
        verify_records(replace(trajectory, turns=(*trajectory.turns[:-1], bare)))


def test_a_changed_row_version_is_an_expert_identity_error(trajectory: Trajectory) -> None:
    experts = trajectory.routed_experts
    assert experts is not None
    spans = tuple((start, version + 1) for start, version in experts.version_spans)
    with pytest.raises(ExpertIdentityError, match="row 0 has version"):
        verify_records(replace(trajectory, routed_experts=replace(experts, version_spans=spans)))


@pytest.mark.parametrize("start", [-1, 2, -(10**6)])
def test_rows_recorded_elsewhere_are_an_expert_identity_error(trajectory: Trajectory, start: int) -> None:
    turns = (replace(trajectory.turns[0], expert_row_start=start), *trajectory.turns[1:])
    with pytest.raises(ExpertIdentityError):
        verify_records(replace(trajectory, turns=turns))


@pytest.mark.parametrize("spans", [((0, 2**63),), ((0, -1),), ((1, 3),), ((0, 3), (0, 4)), ((-1, 3), (0, 3))])
def test_row_versions_that_are_none_are_refused(trajectory: Trajectory, spans: tuple[tuple[int, int], ...]) -> None:
    turns = (replace(trajectory.turns[0], expert_version_spans=spans), *trajectory.turns[1:])
    with pytest.raises(TrajectoryError, match="expert_version_spans"):
        verify_records(replace(trajectory, turns=turns))


@pytest.mark.parametrize(
    "logprobs", [np.float32(0), np.zeros((1, 1), np.float32), np.zeros(1), np.full(1, np.nan, "f4")]
)
def test_trimmed_logprobs_of_another_form_are_refused(trajectory: Trajectory, logprobs: Any) -> None:
    turns = (replace(trajectory.turns[0], trimmed_logprobs=np.asarray(logprobs)), *trajectory.turns[1:])
    with pytest.raises(TrajectoryError, match="trimmed_logprobs"):
        verify_records(replace(trajectory, turns=turns))


@pytest.mark.parametrize("layers", [(1, 0), (1, 1), (-1, 1)])
def test_layers_must_be_global_indices(trajectory: Trajectory, layers: tuple[int, ...]) -> None:
    experts = trajectory.routed_experts
    assert experts is not None
    with pytest.raises(TrajectoryError, match=r"routed_experts\.layers .* must ascend"):
        verify_records(replace(trajectory, routed_experts=replace(experts, layers=layers)))


def test_every_identity_error_is_one_family() -> None:
    assert issubclass(TokenIdentityError, IdentityViolation)
    assert issubclass(ExpertIdentityError, IdentityViolation)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(TokenIdentityError, match="2 output ids but 1"):
        record_digest([1], [2, 3], [-1.0], [(0, 0)])


def test_a_trajectory_without_versions_is_invalid(trajectory: Trajectory) -> None:
    with pytest.raises(TrajectoryError, match="without versions is invalid"):
        verify_records(replace(trajectory, weight_version_spans=((0, -1),)))
