"""C2 at speed: the exact float64 argmax of ``rollout.sampling.draw`` without a float64 pass over the vocabulary.

A token can win only if its noise exceeds best - logprob, and noise grows with the hash. So a table turns the needed
noise into a least hash (rounded down, with a margin far above the error of log), the integer hash of every column is
compared with it, and only the few survivors are scored in float64, with the same libm calls as the definition.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from rollout.kernels.cpu.arrays import stored_type
from rollout.kernels.cpu.compiler import carray, compiled
from rollout.kernels.cpu.filters import filter_row, kept_mass
from rollout.kernels.cpu.logprob import CHUNK, WORTH_A_THREAD, log_sum, logprob, row_tops
from rollout.kernels.cpu.team import Call, entry, pointer, take_jobs
from rollout.sampling import HASH_MAX, LOG_CEILING, LOG_FLOOR, MASK32, row_state
from rollout.types import Float32Array

_STEPS = 8.0
_LEAST = -4.0
_MOST = 22.5
_MARGIN = 1e-6
DRAW, GREEDY, GIVEN, FILTERED = 0, 1, 2, 3
"""What is wanted of a row; FILTERED + DRAW or FILTERED + GREEDY where tokens may be ruled out."""
NOTHING_LEFT = -2
"""Instead of a token: the filters bar them all."""
_NAN, _ZERO, _ONE = np.float32(np.nan), np.float32(0.0), np.float32(1.0)
_MOST_NOISE = 22.2
"""Above the largest noise there is, -log(2**-32) = 22.18."""
NEVER = np.int64(1 << 32)


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


@numba.njit(inline="always", error_model="numpy")
def _least_hash(needed: float, table: np.ndarray) -> np.int64:
    """A hash below which noise of ``needed`` is impossible; NEVER when no hash gives it."""
    if needed > _MOST_NOISE:
        return NEVER
    if needed < _LEAST:
        return np.int64(0)
    return np.int64(table[int((needed - _LEAST) * _STEPS)])


@numba.njit(inline="always", error_model="numpy")
def _hash_chunk(state: np.uint32, start: int, bar: np.int64, count: int, hashes: np.ndarray) -> Any:
    """Hash columns [start, start + count); returns how many reach ``bar``."""
    least = np.uint32(bar)
    reached = np.uint32(0)
    first = np.uint32(start)
    for i in range(count):
        h = _column_hash(state, np.uint32(first + np.uint32(i)))
        hashes[i] = h
        reached += np.uint32(h >= least)
    return int(reached)


@numba.njit(error_model="numpy")
def _likeliest(
    row: np.ndarray, tops: np.ndarray, temperature: np.float32, top: np.float32, log_total: np.float32
) -> Any:
    """Lowest id whose log-prob equals the largest one, which rounding may give to several; -1 when none is finite."""
    highest = (tops.max() / temperature - top) - log_total
    if highest == -np.inf:
        return -1
    for number in range(tops.size):
        if (tops[number] / temperature - top) - log_total == highest:
            for i in range(number * CHUNK, min((number + 1) * CHUNK, row.size)):
                if logprob(row[i], temperature, top, log_total) == highest:
                    return i
    return -1


@numba.njit(error_model="numpy")
def _draw(
    row: np.ndarray,
    tops: np.ndarray,
    temperature: np.float32,
    top: np.float32,
    log_total: np.float32,
    state: np.uint32,
    table: np.ndarray,
    hashes: np.ndarray,
) -> Any:
    """Winner among finite log-probs, -1 when there is none; they are computed where they are needed.

    A row of log-probs is a row of logits with temperature 1, top 0 and log_total 0: those steps change no bit of it.
    """
    best = _likeliest(row, tops, temperature, top, log_total)
    if best < 0:
        return -1
    # Starting from the likeliest token raises the bar for all others at once.
    likeliest = np.float64(logprob(row[best], temperature, top, log_total))
    best_score = likeliest + _gumbel(_column_hash(state, np.uint32(best)))
    for number in range(tops.size):
        highest = np.float64((tops[number] / temperature - top) - log_total)
        bar = _least_hash(best_score - highest, table) if highest > -np.inf else NEVER
        start = number * CHUNK
        count = min(CHUNK, row.size - start)
        if bar == NEVER or _hash_chunk(state, start, bar, count, hashes) == 0:
            continue
        for i in range(count):
            if hashes[i] < bar:
                continue
            value = np.float64(logprob(row[start + i], temperature, top, log_total))
            if value == -np.inf or hashes[i] < _least_hash(best_score - value, table):
                continue
            score = value + _gumbel(hashes[i])
            if score > best_score or (score == best_score and start + i < best):
                best_score = score
                best = start + i
    return best


@numba.njit(error_model="numpy")
def _choose_from_logprobs(
    logprobs: np.ndarray, state: np.uint32, greedy: bool, table: np.ndarray, tops: np.ndarray, hashes: np.ndarray
) -> Any:
    """Token drawn, or the likeliest, from log-probs without NaN; -1 when none is finite."""
    row_tops(logprobs, tops)
    if greedy:
        return _likeliest(logprobs, tops, _ONE, _ZERO, _ZERO)
    return _draw(logprobs, tops, _ONE, _ZERO, _ZERO, state, table, hashes)


@compiled
def _draw_row(logprobs: np.ndarray, state: np.uint32, table: np.ndarray) -> Any:
    """One row of log-probs; -1 when it holds NaN or nothing finite."""
    if np.isnan(logprobs).any():
        return -1
    tops = np.empty((logprobs.size + CHUNK - 1) // CHUNK, np.float32)
    return _choose_from_logprobs(logprobs, state, False, table, tops, np.empty(CHUNK, np.uint32))


@numba.njit(error_model="numpy")
def _sample_filtered(
    row: np.ndarray,
    temperature: np.float32,
    top: np.float32,
    log_total: np.float32,
    state: np.uint32,
    greedy: bool,
    filters: np.ndarray,
    barred: np.ndarray,
    table: np.ndarray,
    tops: np.ndarray,
    hashes: np.ndarray,
    logprobs: np.ndarray,
    keep: np.ndarray,
) -> Any:
    """Token, its policy and behavior log-prob where the distribution is cut; NOTHING_LEFT when all of it is."""
    for i in range(row.size):
        logprobs[i] = logprob(row[i], temperature, top, log_total)
    count = filter_row(logprobs, barred, filters, keep)
    if count == 0:
        return NOTHING_LEFT, _NAN, _NAN
    largest, mass = (0.0, 1.0) if count == row.size else kept_mass(logprobs, keep)
    for i in range(row.size):
        if not keep[i]:
            logprobs[i] = -np.inf
    token = _choose_from_logprobs(logprobs, state, greedy, table, tops, hashes)
    if token < 0:
        return -1, _NAN, _NAN
    policy = logprobs[token]
    if count == row.size:
        return token, policy, policy
    return token, policy, np.float32(min(np.float64(policy) - (largest + math.log(mass)), 0.0))


@compiled
def sample_rows(
    logits: np.ndarray,
    vocab: int,
    temperatures: np.ndarray,
    states: np.ndarray,
    kinds: np.ndarray,
    filters: np.ndarray,
    bars: np.ndarray,
    barred: np.ndarray,
    table: np.ndarray,
    tokens: np.ndarray,
    logprobs: np.ndarray,
) -> None:
    """Draw, or take the likeliest, or look up the given token, row by row.

    Args:
        logits: [N, >= V] stored. temperatures float32 [N]. states int64 [N], of ``row_state``. kinds int64 [N]: DRAW,
            GREEDY or GIVEN, plus FILTERED. filters float64 [N, 3], see ``filters``. bars int64 [N + 1]: row n bars
            ``barred[bars[n] : bars[n + 1]]``. tokens int64 [N]: given where GIVEN, else written; -1 where a row holds
            NaN or nothing finite, NOTHING_LEFT where the filters bar all. logprobs float32 [N, 2], written: policy,
            behavior; NaN there.
    """
    tops = np.empty((vocab + CHUNK - 1) // CHUNK, np.float32)
    hashes = np.empty(CHUNK, np.uint32)
    cut = (kinds >= FILTERED).any()
    whole, keep = np.empty(vocab if cut else 0, np.float32), np.empty(vocab if cut else 0, np.bool_)
    for n in range(tokens.size):
        row, temperature, state = logits[n, :vocab], temperatures[n], np.uint32(states[n])
        top = row_tops(row, tops) / temperature
        log_total = log_sum(row, temperature, top)
        logprobs[n, :] = _NAN
        if log_total != log_total:
            if kinds[n] != GIVEN:
                tokens[n] = -1
            continue
        if kinds[n] >= FILTERED:
            tokens[n], logprobs[n, 0], logprobs[n, 1] = _sample_filtered(
                row, temperature, top, log_total, state, kinds[n] == FILTERED + GREEDY, filters[n],
                barred[bars[n] : bars[n + 1]], table, tops, hashes, whole, keep,
            )  # fmt: skip
            continue
        if kinds[n] == GREEDY:
            tokens[n] = _likeliest(row, tops, temperature, top, log_total)
        elif kinds[n] == DRAW:
            tokens[n] = _draw(row, tops, temperature, top, log_total, state, table, hashes)
        if tokens[n] >= 0:
            logprobs[n, :] = logprob(row[tokens[n]], temperature, top, log_total)


@functools.lru_cache(maxsize=2)
def _sample_entry(stored: type) -> Any:
    """Jobs are rows. logits, columns, vocab, temperatures, states, kinds, filters, bars, barred, ids in it, table,
    entries of it, tokens, logprobs."""

    def sample(address: Any) -> None:
        block = carray(address, 17, np.int64)
        rows = block[1]
        logits = carray(pointer(block[3]), (rows, block[4]), stored)
        temperatures = carray(pointer(block[6]), rows, np.float32)
        states, kinds = carray(pointer(block[7]), rows, np.int64), carray(pointer(block[8]), rows, np.int64)
        filters, bars = carray(pointer(block[9]), (rows, 3), np.float64), carray(pointer(block[10]), rows + 1, np.int64)
        barred = carray(pointer(block[11]), block[12], np.int64)
        table = carray(pointer(block[13]), block[14], np.uint32)
        tokens, logprobs = carray(pointer(block[15]), rows, np.int64), carray(pointer(block[16]), (rows, 2), np.float32)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            here = slice(first, last)
            sample_rows(
                logits[here], block[5], temperatures[here], states[here], kinds[here], filters[here],
                bars[first : last + 1], barred, table, tokens[here], logprobs[here],
            )  # fmt: skip

    return entry(sample)


@dataclass(frozen=True, slots=True)
class RowsToSample:
    """What is wanted of N rows; see ``sample_rows``."""

    temperatures: torch.Tensor
    """float32 [N]"""
    states: torch.Tensor
    """int64 [N]"""
    kinds: torch.Tensor
    """int64 [N]"""
    filters: torch.Tensor
    """float64 [N, 3]"""
    bars: torch.Tensor
    """int64 [N + 1]"""
    barred: torch.Tensor
    """int64 [ids]"""
    tokens: torch.Tensor
    """int64 [N], read where a token is given, else written"""


class CpuSampler:
    """Draws tokens for rows of policy log-probs. Holds scratch only; a draw depends on its arguments alone."""

    def __init__(self) -> None:
        self._table = threshold_table()
        self._calls: dict[type, Call] = {}

    def draw(self, logprobs: Float32Array, keep: npt.NDArray[np.bool_] | None, seed: int, position: int) -> int:
        """Same result as ``rollout.sampling.draw``; -1 where the row holds NaN or keeps nothing."""
        if keep is not None:
            logprobs = np.where(keep, logprobs, np.float32(-np.inf))
        return int(_draw_row(logprobs, np.uint32(row_state(seed, position) & MASK32), self._table))

    def sample(self, logits: torch.Tensor, vocab_size: int, rows: RowsToSample) -> torch.Tensor:
        """``sample_rows`` on all threads: logits [N, >= V]; fills ``rows.tokens``, returns log-probs [N, 2]."""
        logits = logits.contiguous()
        logprobs = torch.empty(logits.size(0), 2)
        stored = stored_type(logits.dtype)
        if stored not in self._calls:
            self._calls[stored] = Call(_sample_entry(stored), "q" * 14)
        self._calls[stored](
            logits.size(0), 2 * logits.size(0) * vocab_size, WORTH_A_THREAD, logits.data_ptr(), logits.size(1),
            vocab_size, rows.temperatures.data_ptr(), rows.states.data_ptr(), rows.kinds.data_ptr(),
            rows.filters.data_ptr(), rows.bars.data_ptr(), rows.barred.data_ptr(), rows.barred.numel(),
            self._table.ctypes.data, self._table.size, rows.tokens.data_ptr(), logprobs.data_ptr(),
        )  # fmt: skip
        return logprobs
