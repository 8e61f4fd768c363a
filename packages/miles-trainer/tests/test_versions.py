"""Version labels of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_trainer import VersionIdentityError, check_versions
from miles_trainer.testing import make_samples
from miles_trainer.versions import token_versions


def test_spans_cover_the_tokens_that_follow_them() -> None:
    sample = make_samples(groups=1, members=1)[0]
    tokens = len(sample.token_ids)
    assert token_versions(replace(sample, version_spans=((1, 4), (3, 5)))).tolist() == [-1, 4, 4] + [5] * (tokens - 3)
    assert token_versions(replace(sample, version_spans=())).tolist() == [-1] * tokens


def test_labels_must_have_been_published_and_be_fresh_enough() -> None:
    samples = make_samples(version=3)
    check_versions(samples, current=3)
    check_versions(samples, current=5, max_staleness=2)
    check_versions([replace(s, version_spans=()) for s in samples], current=0)
    with pytest.raises(VersionIdentityError, match="labelled version 3"):
        check_versions(samples, current=2)
    with pytest.raises(VersionIdentityError, match="sampled at version 3 and the trainer is at 6; the limit is 2"):
        check_versions(samples, current=6, max_staleness=2)
    with pytest.raises(VersionIdentityError, match="labelled version -2"):
        check_versions([replace(samples[0], version_spans=((0, -2),))], current=3)
