"""C1 on CPU, compiled: log_softmax of a row, and of single tokens of it without writing the row.

z = float32(logit) / float32(T); logprob = (z - top) - log(sum of exp(z - top)). The sum runs in 16 float32 lanes over
chunks of 256 columns, which are added in order in float64. In invariant mode ``torch.log_softmax`` is this function, so
``rollout.logprobs`` has these bits on the training side; the rollout's sampler takes them straight from the logits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numba
import numpy as np
import torch

from rollout.kernels.cpu.compiler import carray, compiled
from rollout.kernels.cpu.elements import load
from rollout.kernels.cpu.numerics import exp_lanes
from rollout.kernels.cpu.team import Call, entry, pointer, take_jobs
from rollout.kernels.cpu.vector import (
    WIDTH,
    highest_lanes,
    highest_of_lanes,
    in_all_lanes,
    lanes_below,
    put,
    sum_of_lanes,
    take,
)

CHUNK = 256
"""Columns whose largest value and partial sum are taken together."""
WORTH_A_THREAD = 8192
"""Columns, over all rows, from which handing half of them to a second thread pays."""
_NEG_INF = np.float32(-np.inf)
_FIELDS = "qqq"


@numba.njit(error_model="numpy")
def row_tops(row: np.ndarray, tops: np.ndarray) -> np.float32:
    """Largest logit of every chunk, and of all; NaN is passed over. tops float32 [ceil(V / CHUNK)], written."""
    nothing = in_all_lanes(_NEG_INF)
    top = _NEG_INF
    for number in range(tops.size):
        part = row[number * CHUNK : min((number + 1) * CHUNK, row.size)]
        highest = nothing
        for i in range(0, part.size, WIDTH):
            highest = highest_lanes(lanes_below(take(part, i), part.size - i, nothing), highest)
        tops[number] = highest_of_lanes(highest)
        top = tops[number] if tops[number] > top else top
    return top


@numba.njit(error_model="numpy")
def log_sum(row: np.ndarray, temperature: np.float32, top: np.float32) -> np.float32:
    """log of the sum of exp(z - top), top = largest z. NaN when a logit is NaN or none is finite."""
    divisor, offset, nothing = in_all_lanes(temperature), in_all_lanes(top), in_all_lanes(_NEG_INF)
    total = np.float64(0.0)
    for start in range(0, row.size, CHUNK):
        part = row[start : min(start + CHUNK, row.size)]
        sums = in_all_lanes(np.float32(0.0))
        for i in range(0, part.size, WIDTH):
            shifted = take(part, i) / divisor - offset
            sums = sums + exp_lanes(lanes_below(shifted, part.size - i, nothing))
        total += np.float64(sum_of_lanes(sums))
    return np.float32(math.log(total)) if total > 0.0 else np.float32(np.nan)


@numba.njit(inline="always", error_model="numpy")
def logprob(logit: Any, temperature: np.float32, top: np.float32, log_total: np.float32) -> np.float32:
    """Of one stored logit."""
    return (load(logit) / temperature - top) - log_total


@compiled
def log_softmax_rows(logits: np.ndarray, temperatures: np.ndarray, out: np.ndarray) -> None:
    """logits [N, >= V] stored, temperatures float32 [N], out float32 [N, V]."""
    vocab = out.shape[1]
    tops = np.empty((vocab + CHUNK - 1) // CHUNK, np.float32)
    for n in range(out.shape[0]):
        row, target, temperature = logits[n, :vocab], out[n], temperatures[n]
        top = row_tops(row, tops) / temperature
        divisor, offset = in_all_lanes(temperature), in_all_lanes(top)
        total = in_all_lanes(log_sum(row, temperature, top))
        for i in range(0, vocab, WIDTH):
            put(target, i, (take(row, i) / divisor - offset) - total)


@functools.lru_cache(maxsize=1)
def _softmax_entry() -> Any:
    """Jobs are rows. logits float32 [N, V], out, V."""

    def softmax(address: Any) -> None:
        block = carray(address, 6, np.int64)
        rows, vocab = block[1], block[5]
        logits = carray(pointer(block[3]), (rows, vocab), np.float32)
        out = carray(pointer(block[4]), (rows, vocab), np.float32)
        ones = np.ones(rows, np.float32)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            log_softmax_rows(logits[first:last], ones[first:last], out[first:last])

    return entry(softmax)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., V] -> float32 [..., V], over the last dimension."""
    x = x.contiguous()
    out = torch.empty_like(x)
    vocab = x.size(-1)
    if x.numel():
        run = Call(_softmax_entry(), _FIELDS)
        run(x.numel() // vocab, x.numel(), WORTH_A_THREAD, x.data_ptr(), out.data_ptr(), vocab)
    return out
