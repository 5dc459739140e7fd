"""Paged causal attention for CPU, one compiled kernel for decode, chunk, full prefill and training.

Every query row is computed alone: keys in blocks of one page counted from key 0, in order; scores summed over the head
dimension in order; online softmax in float32 (Milakov & Gimelshein 2018); the row sum in 16 lanes by absolute key
index; PV summed over keys in order. So a row's bits depend on its own query and its own keys only: not on batch,
chunk, query length, page numbers or threads. The contract mirrors FlashAttention-3 ``flash_attn_with_kvcache``
(bottom-right causal mask, rows without keys are zero with lse = -inf) with num_splits = 1.
"""

from __future__ import annotations

import numba
import numpy as np

from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.elements import load
from rollout.kernels.cpu.numerics import exp_f32

LANES = 16
_NEG_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@numba.njit(inline="always", error_model="numpy")
def _widen(source: np.ndarray, target: np.ndarray) -> None:
    """Copy a [rows, cols] block of stored values into float32 scratch."""
    for r in range(source.shape[0]):
        for c in range(source.shape[1]):
            target[r, c] = load(source[r, c])


@numba.njit(inline="always", error_model="numpy")
def _scores(query: np.ndarray, keys: np.ndarray, scores: np.ndarray, width: int, scale: np.float32) -> None:
    """scores[j] = scale * sum_d query[d] * keys[d, j], d in order; -inf from ``width`` on."""
    dim, block = keys.shape
    scores[:] = _ZERO
    quads = dim // 4
    for i in range(quads):
        d = 4 * i
        q0 = query[d]
        q1 = query[d + 1]
        q2 = query[d + 2]
        q3 = query[d + 3]
        for j in range(block):
            scores[j] = (((scores[j] + q0 * keys[d, j]) + q1 * keys[d + 1, j]) + q2 * keys[d + 2, j]) + q3 * keys[
                d + 3, j
            ]
    for d in range(4 * quads, dim):
        q0 = query[d]
        for j in range(block):
            scores[j] = scores[j] + q0 * keys[d, j]
    for j in range(block):
        scores[j] = scores[j] * scale
    for j in range(width, block):
        scores[j] = _NEG_INF


@numba.njit(inline="always", error_model="numpy")
def _block_max(scores: np.ndarray, lanes: np.ndarray) -> np.float32:
    lanes[:] = _NEG_INF
    for j in range(0, scores.size, LANES):
        for t in range(LANES):
            s = scores[j + t]
            lanes[t] = s if s > lanes[t] else lanes[t]
    top = _NEG_INF
    for t in range(LANES):
        top = lanes[t] if lanes[t] > top else top
    return top


@numba.njit(inline="always", error_model="numpy")
def _accumulate(values: np.ndarray, probs: np.ndarray, width: int, acc: np.ndarray) -> None:
    """acc[d] += sum_j probs[j] * values[j, d] for j < width, j in order. Rows from ``width`` on are not read."""
    dim = acc.size
    quads = width // 4
    for i in range(quads):
        j = 4 * i
        p0 = probs[j]
        p1 = probs[j + 1]
        p2 = probs[j + 2]
        p3 = probs[j + 3]
        for d in range(dim):
            acc[d] = (((acc[d] + p0 * values[j, d]) + p1 * values[j + 1, d]) + p2 * values[j + 2, d]) + p3 * values[
                j + 3, d
            ]
    for j in range(4 * quads, width):
        p0 = probs[j]
        for d in range(dim):
            acc[d] = acc[d] + p0 * values[j, d]


@numba.njit(inline="always", error_model="numpy")
def _block_row(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    width: int,
    scale: np.float32,
    scores: np.ndarray,
    lanes: np.ndarray,
    top: np.float32,
    sums: np.ndarray,
    acc: np.ndarray,
) -> np.float32:
    """Fold one KV block into a row's running (max, lane sums, accumulator); returns the new max."""
    _scores(query, keys, scores, width, scale)
    new_top = _block_max(scores, lanes)
    if not new_top > top:
        new_top = top
    if new_top > top:
        shrink = _ZERO if top == _NEG_INF else exp_f32(top - new_top)
        for t in range(LANES):
            sums[t] = sums[t] * shrink
        for d in range(acc.size):
            acc[d] = acc[d] * shrink
    for j in range(scores.size):
        scores[j] = exp_f32(scores[j] - new_top)
    for j in range(0, scores.size, LANES):
        for t in range(LANES):
            sums[t] = sums[t] + scores[j + t]
    _accumulate(values, scores, width, acc)
    return new_top


@numba.njit(inline="always", error_model="numpy")
def _finish_row(
    top: np.float32, sums: np.ndarray, acc: np.ndarray, head: int, row: int, out: np.ndarray, lse: np.ndarray
) -> None:
    """Divide by the row sum; a row that saw no key is zero with lse = -inf."""
    total = _ZERO
    for t in range(LANES):
        total = total + sums[t]
    seen = top != _NEG_INF or total != _ZERO
    lse[head, row] = top + np.float32(np.log(total)) if seen else _NEG_INF
    for d in range(acc.size):
        out[row, head, d] = acc[d] / total if seen else _ZERO


@numba.njit(inline="always", error_model="numpy")
def _attend_task(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    pages: np.ndarray,
    first_row: int,
    rows: int,
    kv_head: int,
    kv_len: int,
    before: int,
    scale: np.float32,
    causal: bool,
    keys: np.ndarray,
    values: np.ndarray,
    scores: np.ndarray,
    lanes: np.ndarray,
    tops: np.ndarray,
    sums: np.ndarray,
    acc: np.ndarray,
) -> None:
    """Fold the sequence's KV blocks, in order, into the running state of ``rows`` rows times one KV head's queries.

    ``pages`` lists the sequence's pages; ``before`` counts its keys before the task's first row.
    """
    page = keys.shape[1]
    group = tops.shape[1]
    last_visible = before + rows if causal else kv_len
    for block in range(max(0, (last_visible + page - 1) // page)):
        _widen(key_pages[pages[block], kv_head], keys)
        _widen(value_pages[pages[block], kv_head], values)
        for r in range(rows):
            visible = before + r + 1 if causal else kv_len
            width = min(page, visible - block * page)
            if width > 0:
                for g in range(group):
                    tops[r, g] = _block_row(
                        query[first_row + r, kv_head * group + g], keys, values, width, scale,
                        scores, lanes, tops[r, g], sums[r, g], acc[r, g],
                    )  # fmt: skip


@compiled
def paged_attention(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    page_table: np.ndarray,
    cache_seqlens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    tasks: np.ndarray,
    tile: int,
    first_job: int,
    last_job: int,
    scale: np.float32,
    causal: bool,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Jobs [first_job, last_job): job = task * H_kv + KV head, task = (sequence, query tile).

    Args:
        query: float32 [T, H, D].
        key_pages: float32 or uint16 (bfloat16 bits) [pages, H_kv, D, page].
        value_pages: same dtype, [pages, H_kv, page, D].
        page_table: int32 [B, max_pages]. cache_seqlens: int32 [B]. cu_seqlens_q: int32 [B + 1].
        tasks: int32 [n, 2] (sequence, first query row within it), ``tile`` rows each.
        out: float32 [T, H, D]. lse: float32 [H, T].
    """
    page = key_pages.shape[3]
    dim = query.shape[2]
    kv_heads = key_pages.shape[1]
    group = query.shape[1] // kv_heads
    keys = np.empty((dim, page), np.float32)
    values = np.empty((page, dim), np.float32)
    scores = np.empty(page, np.float32)
    lanes = np.empty(LANES, np.float32)
    tops = np.empty((tile, group), np.float32)
    sums = np.empty((tile, group, LANES), np.float32)
    acc = np.empty((tile, group, dim), np.float32)
    for job in range(first_job, last_job):
        seq = tasks[job // kv_heads, 0]
        first = tasks[job // kv_heads, 1]
        kv_head = job % kv_heads
        q_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]
        kv_len = cache_seqlens[seq]
        rows = min(tile, q_len - first)
        first_row = cu_seqlens_q[seq] + first
        tops[:] = _NEG_INF
        sums[:] = _ZERO
        acc[:] = _ZERO
        _attend_task(
            query, key_pages, value_pages, page_table[seq], first_row, rows, kv_head, kv_len, kv_len - q_len + first,
            scale, causal, keys, values, scores, lanes, tops, sums, acc,
        )  # fmt: skip
        for r in range(rows):
            for g in range(group):
                _finish_row(tops[r, g], sums[r, g], acc[r, g], kv_head * group + g, first_row + r, out, lse)


@compiled
def write_pages(
    key: np.ndarray, value: np.ndarray, slots: np.ndarray, key_pages: np.ndarray, value_pages: np.ndarray
) -> None:
    """Store key, value [T, H_kv, D] at slots int64 [T] (page * page_size + offset)."""
    page = key_pages.shape[3]
    for t in range(slots.size):
        page_id = slots[t] // page
        offset = slots[t] % page
        for h in range(key.shape[1]):
            for d in range(key.shape[2]):
                key_pages[page_id, h, d, offset] = key[t, h, d]
                value_pages[page_id, h, offset, d] = value[t, h, d]
