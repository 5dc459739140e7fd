"""Distances between float32 bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidRequest
from tests.trainer_bridge.samples import f32
from trainer_bridge.ulp import UlpBin, bits, hex_bits, ordered, ulp_distance, ulp_histogram


def test_neighbours_are_one_apart_on_both_sides_of_zero() -> None:
    tiny = np.float32(1.4e-45)
    values = f32([-1.0, -tiny, -0.0, 0.0, tiny, 1.0])
    up = np.nextafter(values, np.float32(np.inf))
    assert ordered(f32([-tiny, -0.0, 0.0, tiny])).tolist() == [-2, -1, 0, 1]
    assert ulp_distance(values[[0, 4, 5]], up[[0, 4, 5]]).tolist() == [1, 1, 1]


def test_negative_zero_is_equal_to_zero_but_not_in_bits() -> None:
    left, right = f32([0.0]), f32([-0.0])
    assert (left == right).all()
    assert ulp_distance(left, right).tolist() == [1]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_distance_is_zero_exactly_for_equal_bits(left: int, right: int) -> None:
    a, b = (np.array([word], dtype=np.uint32).view(np.float32) for word in (left, right))
    assert (ulp_distance(a, b)[0] == 0) == (left == right)
    assert ulp_distance(a, b)[0] == ulp_distance(b, a)[0]


def test_a_cast_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="float64"):
        bits(np.array([1.0]))


def test_histogram_bins_by_powers_of_two_with_equal_bits_apart() -> None:
    distances = np.array([0, 0, 1, 2, 3, 4, 7, 8, 2**31 - 1, 2**31, 2**32 - 1], dtype=np.int64)
    histogram = ulp_histogram(distances)
    assert histogram[:5] == (UlpBin(0, 0, 2), UlpBin(1, 1, 1), UlpBin(2, 3, 2), UlpBin(4, 7, 2), UlpBin(8, 15, 1))
    assert histogram[-2:] == (UlpBin(2**30, 2**31 - 1, 1), UlpBin(2**31, 2**32 - 1, 2))
    assert sum(b.count for b in histogram) == distances.size
    assert ulp_histogram(distances[:0]) == ()


def test_hex_bits() -> None:
    assert hex_bits(np.float32(-1.0)) == "0xbf800000"
