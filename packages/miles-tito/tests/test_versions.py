"""Version bounds: a label lies between what was acknowledged at dispatch and what was begun at the reply."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from miles_tito import ExpertRows, FinishReason, GenerateReply, RequestError, VersionBounds, VersionIdentityError
from miles_tito import check_versions as check

REPLY = GenerateReply("r", "e:0", (1, 2), np.zeros(2, np.float32), ((0, 3), (1, 4)), FinishReason("stop"), 1, 0, "")


def bounds(begun: int, acknowledged: int) -> VersionBounds:
    return VersionBounds(begun, {"e:0": acknowledged})


def test_labels_within_the_bounds_pass() -> None:
    assert check("w", REPLY, bounds(3, 3), bounds(4, 3)) == "checked"


@pytest.mark.parametrize(("acknowledged", "begun"), [(4, 4), (3, 3), (5, 6)])
def test_a_label_outside_is_a_version_identity_error(acknowledged: int, begun: int) -> None:
    with pytest.raises(VersionIdentityError, match="e:0") as caught:
        check("w", REPLY, bounds(acknowledged, acknowledged), bounds(begun, acknowledged))
    assert caught.value.code == "version_identity"


def test_the_lower_bound_is_that_of_the_dispatch() -> None:
    assert check("w", REPLY, bounds(4, 3), bounds(4, 4)) == "checked"


def test_unknown_bounds_are_reported_and_known_ones_still_checked() -> None:
    assert check("w", REPLY, VersionBounds(), VersionBounds()) == "unknown"
    assert check("w", REPLY, VersionBounds(4, {"other:0": 4}), VersionBounds(4)) == "unknown"
    with pytest.raises(VersionIdentityError):
        check("w", REPLY, VersionBounds(3), VersionBounds(3))


def test_expert_rows_may_be_older_but_not_newer() -> None:
    rows = ExpertRows(np.zeros((2, 1, 1), np.int32), 0, ((0, 1), (1, 4)))
    assert check("w", replace(REPLY, experts=rows), bounds(4, 3), bounds(4, 3)) == "checked"
    newer = replace(rows, version_spans=((0, 5),))
    with pytest.raises(VersionIdentityError, match="5"):
        check("w", replace(REPLY, experts=newer), bounds(4, 3), bounds(4, 3))


def test_nothing_is_acknowledged_before_it_was_begun() -> None:
    with pytest.raises(RequestError, match="after 2"):
        VersionBounds(2, {"e:0": 3})
