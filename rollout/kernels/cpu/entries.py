"""C entries of the decoder's kernels: unpack a call block into arrays and take jobs until none is left.

One family per stored type (uint16 for bfloat16 bits, float32). Addresses in a block are of contiguous arrays that the
caller keeps alive.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from rollout.kernels.cpu import fused
from rollout.kernels.cpu.attention import paged_attention
from rollout.kernels.cpu.compiler import carray
from rollout.kernels.cpu.team import entry, pointer, take_jobs

NORM_FIELDS = "q" * 5 + "d"
GATED_FIELDS = "q" * 3
ROPE_FIELDS = "q" * 16 + "d"
ATTENTION_FIELDS = "q" * 19 + "d"


@numba.njit(inline="always", error_model="numpy")
def _words(address: Any, count: int) -> Any:
    return carray(address, count, np.int64)


@numba.njit(inline="always", error_model="numpy")
def _real(address: Any, at: int) -> Any:
    return np.float32(carray(address, at + 1, np.float64)[at])


@functools.lru_cache(maxsize=2)
def add_norm_entry(stored: type) -> Any:
    """Jobs are rows. residual, x (0: nothing to add), weight, out, columns, eps."""

    def add_norm(address: Any) -> None:
        block, eps = _words(address, 8), _real(address, 8)
        rows, columns = block[1], block[7]
        residual = carray(pointer(block[3]), (rows, columns), stored)
        weight = carray(pointer(block[5]), columns, stored)
        out = carray(pointer(block[6]), (rows, columns), stored)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            if block[4] == 0:
                fused.rms_norm(residual[first:last], weight, eps, out[first:last])
            else:
                x = carray(pointer(block[4]), (rows, columns), stored)
                fused.add_rms_norm(residual[first:last], x[first:last], weight, eps, out[first:last])

    return entry(add_norm)


@functools.lru_cache(maxsize=2)
def gated_entry(stored: type) -> Any:
    """Jobs are rows. gate and up, out, columns of out."""

    def gated(address: Any) -> None:
        block = _words(address, 6)
        rows, columns = block[1], block[5]
        gate_up = carray(pointer(block[3]), (rows, 2 * columns), stored)
        out = carray(pointer(block[4]), (rows, columns), stored)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            fused.silu_mul(gate_up[first:last], out[first:last])

    return entry(gated)


@functools.lru_cache(maxsize=2)
def rope_entry(stored: type) -> Any:
    """Jobs are rows. qkv, cos, sin, table rows, positions, slots, q_norm, k_norm (0: none), key pages, value pages,
    query, pages, H, H_kv, D, page size, eps."""

    def rope(address: Any) -> None:
        block, eps = _words(address, 19), _real(address, 19)
        rows, tables, pages, heads, kv_heads, dim, page = (
            block[1], block[6], block[14], block[15], block[16], block[17], block[18],
        )  # fmt: skip
        qkv = carray(pointer(block[3]), (rows, (heads + 2 * kv_heads) * dim), stored)
        cos = carray(pointer(block[4]), (tables, dim), stored)
        sin = carray(pointer(block[5]), (tables, dim), stored)
        positions = carray(pointer(block[7]), rows, np.int64)
        slots = carray(pointer(block[8]), rows, np.int64)
        normed = dim if block[9] != 0 else 0
        q_norm, k_norm = carray(pointer(block[9]), normed, stored), carray(pointer(block[10]), normed, stored)
        key_pages = carray(pointer(block[11]), (pages, kv_heads, dim, page), stored)
        value_pages = carray(pointer(block[12]), (pages, kv_heads, page, dim), stored)
        query = carray(pointer(block[13]), (rows, heads, dim), stored)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            fused.rope_and_write(
                qkv[first:last], cos, sin, positions[first:last], slots[first:last], q_norm, k_norm, eps,
                key_pages, value_pages, query[first:last],
            )  # fmt: skip

    return entry(rope)


@functools.lru_cache(maxsize=2)
def attention_entry(stored: type) -> Any:
    """Jobs as in ``paged_attention``. query, key pages, value pages, page table, cache_seqlens, cu_seqlens_q, tasks,
    out, lse (0: not wanted), rows, sequences, pages per sequence, tile, causal, pages, H, H_kv, D, page size, scale."""

    def attention(address: Any) -> None:
        block, scale = _words(address, 22), _real(address, 22)
        rows, sequences, width, pages = block[12], block[13], block[14], block[17]
        heads, kv_heads, dim, page = block[18], block[19], block[20], block[21]
        query = carray(pointer(block[3]), (rows, heads, dim), stored)
        key_pages = carray(pointer(block[4]), (pages, kv_heads, dim, page), stored)
        value_pages = carray(pointer(block[5]), (pages, kv_heads, page, dim), stored)
        table = carray(pointer(block[6]), (sequences, width), np.int32)
        seqlens = carray(pointer(block[7]), sequences, np.int32)
        edges = carray(pointer(block[8]), sequences + 1, np.int32)
        tasks = carray(pointer(block[9]), (block[1] // kv_heads, 2), np.int32)
        out = carray(pointer(block[10]), (rows, heads, dim), stored)
        wanted = block[11] != 0
        lse = carray(pointer(block[11]), (heads if wanted else 0, rows if wanted else 0), np.float32)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            paged_attention(
                query, key_pages, value_pages, table, seqlens, edges, tasks, block[15], first, last, scale,
                block[16] != 0, out, lse,
            )  # fmt: skip

    return entry(attention)
