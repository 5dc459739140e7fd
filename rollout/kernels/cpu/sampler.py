"""C2 at speed: the exact float64 argmax of ``rollout.sampling.draw`` without a float64 pass over the vocabulary.

A token can win only if its noise exceeds best - logprob, and noise grows with the hash. So a table turns the needed
noise into a least hash (rounded down, with a margin far above the error of log), the integer hash of every column is
compared with it, and only the few survivors are scored in float64, with the same libm calls as the definition.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

from rollout.sampling import HASH_MAX, LOG_CEILING, LOG_FLOOR, MASK32, row_state
from rollout.types import Float32Array

_STEPS = 8.0
_LEAST = -4.0
_MOST = 22.5
_MARGIN = 1e-6


def threshold_table() -> npt.NDArray[np.uint32]:
    """Entry i: no hash below it gives noise of at least -4 + i/8. uint32 [212]."""
    needed = _LEAST + np.arange(int((_MOST - _LEAST) * _STEPS) + 1) / _STEPS - _MARGIN
    least = np.floor(HASH_MAX * np.exp(-np.exp(-needed))) - 2.0
    return np.clip(least, 0.0, HASH_MAX).astype(np.uint32)


@numba.njit(inline="always", error_model="numpy")
def _column_hash(state: np.uint32, column: np.uint32) -> np.uint32:
    k = np.uint32(column * np.uint32(0xCC9E2D51))
    k = np.uint32((k << np.uint32(15)) | (k >> np.uint32(17)))
    h = np.uint32(state ^ np.uint32(k * np.uint32(0x1B873593)))
    h = np.uint32((h << np.uint32(13)) | (h >> np.uint32(19)))
    h = np.uint32(np.uint32(h * np.uint32(5) + np.uint32(0xE6546B64)) ^ np.uint32(16))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@numba.njit(inline="always", error_model="numpy")
def _gumbel(hashed: np.uint32) -> float:
    x = np.float64(hashed) / HASH_MAX
    log_x = math.log(x) if x > 0.0 else -np.inf
    return -math.log(-min(max(log_x, LOG_FLOOR), LOG_CEILING))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _draw_row(logprobs: np.ndarray, state: np.uint32, table: np.ndarray, hashes: np.ndarray) -> int:
    """Winner among finite log-probs; -1 when there is none or when a NaN is met."""
    best = -1
    best_score = -np.inf
    chunk = hashes.size
    for start in range(0, logprobs.size, chunk):
        stop = min(start + chunk, logprobs.size)
        for i in range(stop - start):
            hashes[i] = _column_hash(state, np.uint32(np.uint32(start) + np.uint32(i)))
        for i in range(stop - start):
            logprob = np.float64(logprobs[start + i])
            if logprob == -np.inf:
                continue
            if logprob != logprob:
                return -1
            needed = best_score - logprob
            if needed > 22.2:  # above the largest noise there is
                continue
            if needed >= -4.0 and hashes[i] < table[int((needed + 4.0) * 8.0)]:
                continue
            score = logprob + _gumbel(hashes[i])
            if score > best_score:
                best_score = score
                best = start + i
    return best


class CpuSampler:
    """Draws tokens for rows of policy log-probs. Holds scratch only; a draw depends on its arguments alone."""

    def __init__(self) -> None:
        self._table = threshold_table()
        self._hashes = np.empty(1024, np.uint32)

    def draw(self, logprobs: Float32Array, keep: npt.NDArray[np.bool_] | None, seed: int, position: int) -> int:
        """Same result as ``rollout.sampling.draw``; -1 where the row holds NaN or keeps nothing."""
        if keep is not None:
            logprobs = np.where(keep, logprobs, np.float32(-np.inf))
        return int(_draw_row(logprobs, np.uint32(row_state(seed, position) & MASK32), self._table, self._hashes))
