"""Scalar float32 numerics compiled by numba, without fused or reassociated arithmetic.

LLVM contracts or reorders floating point only under fast-math flags, and none is set here: the same operations in
the same order give the same bits whether a loop was vectorised, unrolled or left scalar.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from rollout.kernels.cpu.vector import (
    exponent_lanes,
    highest_lanes,
    in_all_lanes,
    lowest_lanes,
    zero_below,
)

_LOG2E = np.float32(1.4426950408889634)
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest integer, ties to even
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@numba.njit(inline="always", error_model="numpy")
def exp_f32(x: np.float32) -> np.float32:
    """e**x for x <= 88: Cephes ``expf`` (argument reduction by ln 2, degree-5 polynomial), under 2 ulp.

    Below -87 the result is exactly 0: a subnormal probability cannot matter to a float32 sum with a term of 1. NaN
    stays NaN.
    """
    c = min(max(x, _LOWEST), _HIGHEST)
    t = c * _LOG2E + _ROUND
    n = t - _ROUND
    r = (c - n * _LN2_HI) - n * _LN2_LO
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    y = (p * (r * r) + r) + _ONE
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    y = y * scale
    return _ZERO if x < _LOWEST else (y if x == x else x)


@numba.njit(inline="always", error_model="numpy")
def exp_lanes(x: Any) -> Any:
    """``exp_f32`` lane by lane: the same steps, the same bits."""
    lowest, shift = in_all_lanes(_LOWEST), in_all_lanes(_ROUND)
    c = lowest_lanes(highest_lanes(x, lowest), in_all_lanes(_HIGHEST))
    t = c * in_all_lanes(_LOG2E) + shift
    n = t - shift
    r = (c - n * in_all_lanes(_LN2_HI)) - n * in_all_lanes(_LN2_LO)
    p = in_all_lanes(_P0) * r + in_all_lanes(_P1)
    p = p * r + in_all_lanes(_P2)
    p = p * r + in_all_lanes(_P3)
    p = p * r + in_all_lanes(_P4)
    p = p * r + in_all_lanes(_P5)
    y = (p * (r * r) + r) + in_all_lanes(_ONE)
    return zero_below(y * exponent_lanes(n), x, lowest)
