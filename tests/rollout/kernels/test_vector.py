"""Lanes: loads and stores at the end of an array, rounding, comparisons, and arithmetic equal to numpy's."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from rollout.kernels.cpu.elements import load, store
from rollout.kernels.cpu.numerics import exp_f32, exp_lanes
from rollout.kernels.cpu.vector import (
    highest_lanes,
    highest_of_lanes,
    in_all_lanes,
    lane,
    lanes_below,
    put,
    round_lanes,
    sum_of_lanes,
    take,
)

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.3895314e38, 3.4e38, 1.00390625, 1.01171875]


@numba.njit(error_model="numpy")
def arithmetic(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, a.size, 16):
        x, y = take(a, i), take(b, i)
        put(out[0], i, x + y)
        put(out[1], i, x - y)
        put(out[2], i, x * y)
        put(out[3], i, x / y)
        put(out[4], i, -x)


@numba.njit(error_model="numpy")
def exponentials(x: np.ndarray, by_lane: np.ndarray, one_by_one: np.ndarray) -> None:
    for i in range(0, x.size, 16):
        put(by_lane, i, exp_lanes(take(x, i)))
    for i in range(x.size):
        one_by_one[i] = exp_f32(x[i])


@numba.njit(error_model="numpy")
def copied(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(0, source.size, 16):
        put(target, i, take(source, i))


@numba.njit(error_model="numpy")
def folded(x: np.ndarray, count: int) -> tuple[float, float, float]:
    values = lanes_below(take(x, 0), count, in_all_lanes(np.float32(-1.0)))
    return sum_of_lanes(values), highest_of_lanes(values), lane(highest_lanes(values, in_all_lanes(np.float32(0.5))), 3)


@numba.njit(error_model="numpy")
def rounded(x: np.ndarray, like: np.ndarray, by_lane: np.ndarray, one_by_one: np.ndarray) -> None:
    for i in range(0, x.size, 16):
        put(by_lane, i, round_lanes(take(x, i), like))
    for i in range(x.size):
        one_by_one[i] = load(store(x[i], like[0]))


def numbers(count: int, seed: int = 0) -> np.ndarray:
    plain = np.random.default_rng(seed).standard_normal(count - len(SPECIAL)).astype(np.float32)
    return np.concatenate((plain, np.array(SPECIAL, np.float32)))


@pytest.mark.parametrize("count", [16, 21, 32, 47])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_arithmetic_is_numpys_lane_by_lane(count: int) -> None:
    a, b = numbers(count), numbers(count, 1)[::-1].copy()
    out = np.empty((5, count), np.float32)
    arithmetic(a, b, out)
    for got, wanted in zip(out, (a + b, a - b, a * b, a / b, -a), strict=True):
        same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
        assert same.all()


def test_exponential_is_the_scalar_one() -> None:
    x = np.concatenate((numbers(60), np.linspace(-90, 88, 5003).astype(np.float32)))
    x = np.minimum(x, np.float32(88))
    x[:3] = np.nan, -np.inf, -87.0
    by_lane, one_by_one = np.empty_like(x), np.empty_like(x)
    exponentials(x, by_lane, one_by_one)
    assert by_lane.tobytes() == one_by_one.tobytes() or np.array_equal(by_lane, one_by_one, equal_nan=True)
    assert np.isnan(by_lane[0]) and by_lane[1] == 0 and by_lane[2] > 0


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("stored", [np.float32, np.uint16])
def test_ends_of_arrays_are_kept(count: int, stored: type) -> None:
    """Neighbours are neither read nor written: the source is cut from NaN, the target from a known pattern."""
    room = np.full(count + 40, 0x7FC0, stored) if stored is np.uint16 else np.full(count + 40, np.nan, stored)
    room[:count] = np.arange(count) + 1 if stored is np.float32 else np.arange(count, dtype=np.uint16) + 0x3F80
    target = np.full(count + 40, 7, stored)
    copied(room[:count], target[:count])
    assert target[:count].tobytes() == room[:count].tobytes() and (target[count:] == 7).all()


def test_folds_take_lanes_in_order() -> None:
    x = np.array([1e8, 1, -1e8, 1, *range(12)], np.float32)
    total = np.float32(0)
    for value in x[:10]:
        total = total + value
    for _ in range(6):
        total = total - np.float32(1)
    got = folded(x, 10)
    assert got[0] == total and got[1] == 1e8 and got[2] == 1.0
    assert got[0] != x[:10].astype(np.float64).sum() - 6, "control: the order shows"


def test_rounding_to_bfloat16_is_torchs() -> None:
    x = numbers(400)
    by_lane, one_by_one = np.empty_like(x), np.empty_like(x)
    rounded(x, np.zeros(1, np.uint16), by_lane, one_by_one)
    wanted = torch.from_numpy(x).bfloat16().float().numpy()
    for got in (by_lane, one_by_one):
        assert (
            np.array_equal(got, wanted, equal_nan=True) and (np.signbit(got) == np.signbit(wanted))[~np.isnan(x)].all()
        )
    assert not np.array_equal(by_lane, x, equal_nan=True)
    rounded(x, np.zeros(1, np.float32), by_lane, one_by_one)
    assert np.array_equal(by_lane, x, equal_nan=True)
