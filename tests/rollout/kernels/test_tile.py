"""The register tile: one chain of fused multiply-adds an element, nothing read behind the depth."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.kernels.cpu.tile import multiply
from tests.rollout.kernels.dense import Float32, fused_multiply_add


def values(seed: int, *shape: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits_of(x: Float32) -> np.ndarray:
    """bfloat16 by truncation: any bits will do."""
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def chain(a: Float32, b: Float32, c: Float32, depth: int) -> Float32:
    for k in range(depth):
        c = fused_multiply_add(a[:, k : k + 1], b[k][None], c)
    return c


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 9, 13])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 48, 64, 128 + 16 + 3])
@pytest.mark.parametrize("stored", [np.float32, np.uint16])
def test_an_element_is_one_chain_of_fused_multiply_adds(rows: int, columns: int, stored: type) -> None:
    depth = 9
    a, b, before = values(1, rows, 12), values(2, 12, columns), values(3, rows, columns)
    a[:, depth:], b[depth:] = np.nan, np.nan
    right = b
    if stored is np.uint16:
        right = bits_of(b)
        b = (right.astype(np.uint32) << np.uint32(16)).view(np.float32)
    for fresh, start in ((True, np.zeros_like(before)), (False, before)):
        c = before.copy()
        multiply(a, right, c, depth, fresh)
        assert c.tobytes() == chain(a, b, start, depth).tobytes()
        # Control: multiply, round, add, round is another number.
        apart = start
        for k in range(depth):
            apart = apart + a[:, k : k + 1] * b[k][None]
        if rows * columns > 60:
            assert c.tobytes() != apart.tobytes()


def test_views_with_strides_and_depth_zero() -> None:
    a, b, c = values(1, 4, 8), values(2, 8, 40), values(3, 4, 40)
    wide = c.copy()
    multiply(a[1:3], b[:, 8:24], wide[1:3, 8:24], 8, False)
    assert wide[1:3, 8:24].tobytes() == chain(a[1:3], b[:, 8:24], c[1:3, 8:24], 8).tobytes()
    wide[1:3, 8:24] = c[1:3, 8:24]
    assert wide.tobytes() == c.tobytes(), "nothing else is written"
    multiply(a, b, wide, 0, True)
    assert not wide.any()
