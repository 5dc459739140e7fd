"""Paged causal attention for CPU, one compiled kernel for decode, chunk, full prefill and training.

Every query row is computed alone: keys in blocks of one page counted from key 0, in order; scores summed over the head
dimension in order; online softmax in float32 (Milakov & Gimelshein 2018); the row sum in 16 lanes by absolute key
index; PV summed over keys in order. So a row's bits depend on its own query and its own keys only: not on batch,
chunk, query length, page numbers or threads. The contract mirrors FlashAttention-3 ``flash_attn_with_kvcache``
(bottom-right causal mask, rows without keys are zero with lse = -inf) with num_splits = 1.

Rows share loads, never sums: the rows of a task that use one KV head go through the products of ``tile`` together, each
as a chain of its own. A row's chain ends at its last visible key, so nothing behind the mask is read for values, and
what is read for scores is overwritten before use.
"""

from __future__ import annotations

import numba
import numpy as np

from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.elements import load, store
from rollout.kernels.cpu.numerics import exp_f32, exp_lanes
from rollout.kernels.cpu.prefetch import call_for
from rollout.kernels.cpu.tile import multiply
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

_NEG_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@numba.njit(inline="always", error_model="numpy")
def _fold_block(
    scores: np.ndarray, width: int, scale: np.float32, top: np.float32, sums: np.ndarray, acc: np.ndarray
) -> np.float32:
    """Turn a block's raw scores into probabilities against the running max; returns the new max.

    Scores from ``width`` on are masked whatever they hold. sums and acc shrink when the max grew.
    """
    block = scores.size
    hidden, scales = in_all_lanes(_NEG_INF), in_all_lanes(scale)
    tops = hidden
    for j in range(0, block, WIDTH):
        scaled = lanes_below(take(scores, j) * scales, width - j, hidden)
        put(scores, j, scaled)
        tops = highest_lanes(scaled, tops)
    new_top = highest_of_lanes(tops)
    if not new_top > top:
        new_top = top
    total = take(sums, 0)
    if new_top > top:
        shrink = in_all_lanes(_ZERO if top == _NEG_INF else exp_f32(top - new_top))
        total = total * shrink
        for d in range(0, acc.size, WIDTH):
            put(acc, d, take(acc, d) * shrink)
    offset = in_all_lanes(new_top)
    for j in range(0, block, WIDTH):
        probs = exp_lanes(take(scores, j) - offset)
        put(scores, j, probs)
        total = total + probs
    put(sums, 0, total)
    return new_top


@numba.njit(inline="always", error_model="numpy")
def _finish_row(top: np.float32, sums: np.ndarray, acc: np.ndarray, out: np.ndarray) -> np.float32:
    """Divide by the row sum and round to the stored type; returns lse. A row without keys is zero with lse = -inf."""
    total = sum_of_lanes(take(sums, 0))
    seen = top != _NEG_INF or total != _ZERO
    for d in range(acc.size):
        out[d] = store(acc[d] / total if seen else _ZERO, out[d])
    return top + np.float32(np.log(total)) if seen else _NEG_INF


@numba.njit(error_model="numpy")
def _attend_task(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    pages: np.ndarray,
    kv_head: int,
    group: int,
    kv_len: int,
    before: int,
    scale: np.float32,
    causal: bool,
    scores: np.ndarray,
    tops: np.ndarray,
    sums: np.ndarray,
    acc: np.ndarray,
    following: np.ndarray,
) -> None:
    """Fold the sequence's KV blocks, in order, into the running state of its rows.

    ``query`` float32 [n, D]: row i is head i % group of position before + i // group; ``pages`` lists the sequence's
    pages; ``before`` counts its keys before the first position; ``following`` are the keys that come after the last.
    """
    bytes_a_page = key_pages.itemsize * query.shape[1] * key_pages.shape[3]
    page, rows = key_pages.shape[3], query.shape[0]
    last_visible = before + rows // group if causal else kv_len
    blocks = max(0, (last_visible + page - 1) // page)
    for block in range(blocks):
        start = block * page
        # Rows before this one end in an earlier block.
        first = max(0, start - before) * group if causal else 0
        columns = min(page, (last_visible - start + WIDTH - 1) // WIDTH * WIDTH)
        keys = key_pages[pages[block], kv_head, :, :columns]
        values = value_pages[pages[block], kv_head]
        # Few rows compute faster than memory answers: values come while scores are computed, the next keys meanwhile.
        call_for(values, bytes_a_page * columns // page)
        multiply(query[first:], keys, scores[first:, :columns], query.shape[1], True)
        for i in range(first, rows):
            width = min(page, (before + i // group + 1 if causal else kv_len) - start)
            tops[i] = _fold_block(scores[i, :columns], width, scale, tops[i], sums[i], acc[i])
        if block + 1 < blocks:
            call_for(key_pages[pages[block + 1], kv_head], bytes_a_page)
        elif following.size > 0:
            call_for(following, bytes_a_page)
        shared = min(page, (before + first // group + 1 if causal else kv_len) - start)
        multiply(scores[first:], values, acc[first:], shared, False)
        for i in range(first, rows, group):
            width = min(page, (before + i // group + 1 if causal else kv_len) - start)
            if width > shared:
                multiply(scores[i : i + group, shared:], values[shared:], acc[i : i + group], width - shared, False)


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
        query: [T, H, D]. key_pages: [pages, H_kv, D, page]. value_pages: [pages, H_kv, page, D]. out: [T, H, D]. All
            float32, or all uint16 (bfloat16 bits).
        page_table: int32 [B, max_pages]. cache_seqlens: int32 [B]. cu_seqlens_q: int32 [B + 1].
        tasks: int32 [n, 2] (sequence, first query row within it), ``tile`` rows each.
        lse: float32 [H, T], or [0, 0] where nobody asks for it.
    """
    page, dim, kv_heads = key_pages.shape[3], query.shape[2], key_pages.shape[1]
    group = query.shape[1] // kv_heads
    queries = np.empty((tile * group, dim), np.float32)
    scores = np.empty((tile * group, page), np.float32)
    tops = np.empty(tile * group, np.float32)
    sums = np.empty((tile * group, WIDTH), np.float32)
    acc = np.empty((tile * group, dim), np.float32)
    for job in range(first_job, last_job):
        seq, first = tasks[job // kv_heads, 0], tasks[job // kv_heads, 1]
        kv_head = job % kv_heads
        q_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]
        kv_len = cache_seqlens[seq]
        rows = min(tile, q_len - first)
        n = rows * group
        tops[:n] = _NEG_INF
        sums[:n] = _ZERO
        acc[:n] = _ZERO
        for i in range(n):
            head = query[cu_seqlens_q[seq] + first + i // group, kv_head * group + i % group]
            for d in range(dim):
                queries[i, d] = load(head[d])
        following = key_pages[0, 0, :0]
        if job + 1 < last_job:
            page_id = page_table[tasks[(job + 1) // kv_heads, 0], 0]
            following = key_pages[page_id, (job + 1) % kv_heads]
        _attend_task(
            queries[:n], key_pages, value_pages, page_table[seq], kv_head, group, kv_len, kv_len - q_len + first,
            scale, causal, scores[:n], tops, sums, acc[:n], following,
        )  # fmt: skip
        for i in range(n):
            row, h = cu_seqlens_q[seq] + first + i // group, kv_head * group + i % group
            row_lse = _finish_row(tops[i], sums[i], acc[i], out[row, h])
            if lse.size > 0:
                lse[h, row] = row_lse


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
