"""The comparison by position, length, replica, version and filter, and its worst tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from rollout.types import VersionSpan
from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.records import ScoredSample
from trainer_bridge.slices import by_filter, by_length, by_position, by_replica, by_version, worst_tokens


def off(values: np.ndarray, at: int, by: float) -> np.ndarray:
    changed = values.copy()
    changed[at] += np.float32(by)
    return changed


def batch() -> list[ScoredSample]:
    """Ten and three tokens; one token of each is off, and NaN stands where the mask is 0."""
    long, short = f32(np.linspace(-1, -2, 10)), f32([-0.5, -0.25, np.nan])
    return [
        sample(
            long, off(long, 7, 0.5), request_id="a", replica="r0", spans=(VersionSpan(3, 0, 5), VersionSpan(4, 5, 10))
        ),
        sample(short, off(short, 0, -0.125), [1, 1, 0], request_id="b", replica="r1", filtered=True),
    ]


def test_every_slice_counts_every_token_once() -> None:
    samples = batch()
    for slices in (
        by_position(samples, 4),
        by_length(samples),
        by_replica(samples),
        by_version(samples),
        by_filter(samples),
    ):
        assert sum(s.tokens for s in slices) == 12
        assert sum(s.tokens - s.equal_tokens for s in slices) == 2
        assert max(s.max_abs for s in slices) == pytest.approx(0.5, abs=1e-6)


def test_keys_and_figures() -> None:
    samples = batch()
    positions = {s.key: s for s in by_position(samples, 4)}
    assert list(positions) == ["0-3", "4-7", "8-11"]
    assert [positions[k].equal_tokens for k in positions] == [5, 3, 2] and positions["8-11"].max_ulp == 0
    assert [(s.key, s.tokens) for s in by_length(samples)] == [("2-3", 2), ("8-15", 10)]
    assert [(s.key, s.equal_fraction) for s in by_replica(samples)] == [("r0", 0.9), ("r1", 0.5)]
    assert [(s.key, s.equal_tokens, s.tokens) for s in by_version(samples)] == [
        ("unknown", 1, 2),
        ("3", 5, 5),
        ("4", 4, 5),
    ]
    assert [s.key for s in by_filter(samples)] == ["unfiltered", "filtered"]


def test_worst_tokens_are_named_worst_first() -> None:
    first, second = worst_tokens(batch())
    assert (first.request_id, first.position, first.token_id, first.replica, first.weight_version) == (
        "a",
        7,
        17,
        "r0",
        4,
    )
    assert (second.request_id, second.position, second.weight_version) == ("b", 0, None)
    assert first.ulp > 0 and worst_tokens(batch(), 1) == [first] and worst_tokens([sample()]) == []


def test_no_data_gives_no_slice() -> None:
    assert by_position([]) == [] and by_length([sample([np.nan], [np.nan], [0])]) == []
    with pytest.raises(InvalidRequest, match="at least 1"):
        by_position([], 0)
