"""Sums of parts round like one sum over everything."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer_bridge.store.exact import expansion, rounded

finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


@given(st.lists(st.lists(finite, max_size=30), min_size=1, max_size=4))
def test_parts_give_the_bits_of_the_whole(parts: list[list[float]]) -> None:
    whole = math.fsum(value for part in parts for value in part)
    assert rounded(expansion(np.array(part, np.float64)) for part in parts) == whole


def test_rounding_each_part_would_not() -> None:
    parts = [[1.0, 2.0**-60], [2.0**-53, -(2.0**-60)]]
    assert rounded(expansion(np.array(p)) for p in parts) == math.fsum([*parts[0], *parts[1]])
    assert rounded(expansion(np.array(p)) for p in ([1.0, 2.0**-60], [2.0**-53])) == 1.0 + 2.0**-52
    assert math.fsum(math.fsum(p) for p in ([1.0, 2.0**-60], [2.0**-53])) != 1.0 + 2.0**-52, "control"


def test_overflow_and_infinity_are_told() -> None:
    assert expansion(np.array([1e308, 1e308])) == [math.inf]
    assert expansion(np.array([math.inf, 1.0])) == [math.inf]
    assert rounded([[1e308], [1e308]]) == math.inf
    assert expansion(np.empty(0)) == [0.0]
