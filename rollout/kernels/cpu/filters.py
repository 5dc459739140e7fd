"""``rollout.sampling.kept_tokens`` and ``relative_mass`` compiled: the same ids, the same float64 steps, few of them.

The definition ranks the whole vocabulary. Here only tokens within a span of the largest are ranked, and the span grows
until the filters are decided inside it.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from rollout.sampling import NUCLEUS_SLACK

TOP_K, TOP_P, MIN_P = 0, 1, 2
"""Columns of the filters of a row, float64."""
_FIRST_SPAN = 2.0
_LAST_SPAN = 64.0


@numba.njit(error_model="numpy")
def _count_and_top(logprobs: np.ndarray, keep: np.ndarray) -> Any:
    """How many are kept, and the largest log-prob among them."""
    count, top = 0, -np.inf
    for i in range(keep.size):
        if keep[i]:
            count += 1
            top = max(top, np.float64(logprobs[i]))
    return count, top


@numba.njit(error_model="numpy")
def kept_mass(logprobs: np.ndarray, keep: np.ndarray) -> Any:
    """See ``rollout.sampling.relative_mass``."""
    count, top = _count_and_top(logprobs, keep)
    if keep.size - count < count:
        rest = 1.0
        if count < keep.size:
            for i in range(keep.size):
                if not keep[i]:
                    rest -= math.exp(np.float64(logprobs[i]))
        if rest > 0.5:
            return top, rest / math.exp(top)
    mass = 0.0
    for i in range(keep.size):
        if keep[i]:
            mass += math.exp(np.float64(logprobs[i]) - top)
    return top, mass


@numba.njit(error_model="numpy")
def _rank_within(logprobs: np.ndarray, keep: np.ndarray, least: float) -> Any:
    """Ids of kept tokens with log-prob >= least, highest first, equal ones by id."""
    count = 0
    for i in range(keep.size):
        count += keep[i] and logprobs[i] >= least
    keys = np.empty(count, np.uint64)
    at = 0
    for i in range(keep.size):
        if keep[i] and logprobs[i] >= least:
            # Order of floats as order of integers, downwards; adding zero makes one zero of two.
            bits = np.float32(logprobs[i] + np.float32(0.0)).view(np.uint32)
            rising = ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)
            keys[at] = (np.uint64(np.uint32(~rising)) << np.uint64(32)) | np.uint64(i)
            at += 1
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


@numba.njit(error_model="numpy")
def _nucleus(logprobs: np.ndarray, ids: np.ndarray, top: float, goal: float) -> Any:
    """How many of the ranked ids have less than ``goal`` before them, and the mass after the last of those."""
    before, count = 0.0, 0
    while count < ids.size and before < goal:
        before += math.exp(np.float64(logprobs[ids[count]]) - top)
        count += 1
    return count, before


@numba.njit(error_model="numpy")
def _top_k(logprobs: np.ndarray, keep: np.ndarray, top: float, k: int) -> Any:
    """Ids of the k likeliest, ranked."""
    span = _FIRST_SPAN
    while True:
        least = -np.inf if span > _LAST_SPAN else top - span
        ids = _rank_within(logprobs, keep, least)
        if ids.size >= k or span > _LAST_SPAN:
            return ids[: min(k, ids.size)]
        span *= 2.0


@numba.njit(error_model="numpy")
def _top_p(logprobs: np.ndarray, keep: np.ndarray, top: float, goal: float) -> Any:
    """Ids of the nucleus, ranked."""
    span = _FIRST_SPAN
    while True:
        least = -np.inf if span > _LAST_SPAN else top - span
        ids = _rank_within(logprobs, keep, least)
        count, before = _nucleus(logprobs, ids, top, goal)
        if not before < goal or span > _LAST_SPAN:
            return ids[: max(count, 1)]
        span *= 2.0


@numba.njit(error_model="numpy")
def filter_row(logprobs: np.ndarray, barred: np.ndarray, filters: np.ndarray, keep: np.ndarray) -> Any:
    """Fill ``keep`` bool [V] as ``kept_tokens`` does; returns how many are kept. logprobs float32 [V] without NaN."""
    k, p, min_p = int(filters[TOP_K]), filters[TOP_P], filters[MIN_P]
    keep[:] = True
    for i in range(barred.size):
        keep[barred[i]] = False
    count, top = _count_and_top(logprobs, keep)
    if count == 0 or not (k > 0 or p < 1.0 or min_p > 0.0):
        return count
    floor = top + math.log(min_p) if min_p > 0.0 else -np.inf
    if k > 0:
        ids = _top_k(logprobs, keep, top, k)
        if p < 1.0:
            keep[:] = False
            for i in ids:
                keep[i] = True
            top, total = kept_mass(logprobs, keep)
            ids = ids[: max(_nucleus(logprobs, ids, top, p * total * NUCLEUS_SLACK)[0], 1)]
    elif p < 1.0:
        ids = _top_p(logprobs, keep, top, p * kept_mass(logprobs, keep)[1] * NUCLEUS_SLACK)
    else:
        # A little below the floor: the exact comparison is made in float64 below.
        ids = _rank_within(logprobs, keep, floor - 1e-3)
    keep[:] = False
    count = 0
    for i in ids:
        if np.float64(logprobs[i]) >= floor:
            keep[i] = True
            count += 1
    return count
