"""The arithmetic of flash_attn_npu's kernels, row by row: tiles, masks and sums as read in its sources.

Queries come in tiles of 128 rows from the call's first row, keys in tiles of 512 from key 0. A causal query tile b sees
keys up to min(kv, (b + 1) * 128 + kv - q); what lies between a row's last key and that end is read and masked, so it
must be finite. The row sum of a key tile adds sums of 64 in sequence, but in the later line as a binary tree when the
tile is 256 or 512 wide. P is rounded to the input's dtype before it meets V. What the emulator cannot know (order
within one cube instruction) it does in sequence.
"""

from __future__ import annotations

import numba
import numpy as np

from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.numerics import exp_f32

QUERY_TILE = 128
KEY_TILE = 512
BLOCK = 64
_ZERO = np.float32(0.0)
_NEG_INF = np.float32(-np.inf)


@numba.njit(inline="always", error_model="numpy")
def _exp(x: np.float32) -> np.float32:
    return exp_f32(x) if x == x else x


@numba.njit(error_model="numpy")
def _round_all(p: np.ndarray, width: int, halves: int, out: np.ndarray, bits: np.ndarray) -> None:
    """out = p to bfloat16 (halves = 0) or float16 (1) and back, ties to even; ``bits`` is a uint32 view of out."""
    step = np.float32(2.0**-24)
    for j in range(width):
        out[j] = p[j]
        if p[j] != p[j]:
            continue
        if halves == 0:
            b = bits[j]
            bits[j] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        elif p[j] < np.float32(6.2e-5):
            out[j] = np.float32(np.rint(p[j] / step)) * step
        else:
            b = bits[j]
            bits[j] = (b + np.uint32(0xFFF) + ((b >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)


@numba.njit(error_model="numpy")
def _block_sum(p: np.ndarray, start: int, width: int) -> np.float32:
    """Pairwise tree over 64 values; those from ``width`` on count as zeros."""
    tree = np.zeros(BLOCK, np.float32)
    for j in range(BLOCK):
        if start + j < width:
            tree[j] = p[start + j]
    count = BLOCK
    while count > 1:
        count //= 2
        for j in range(count):
            tree[j] = tree[2 * j] + tree[2 * j + 1]
    return tree[0]


@numba.njit(error_model="numpy")
def row_sum(p: np.ndarray, width: int, by_width: bool) -> np.float32:
    """Sum of p[:width] in the order that the line takes for a tile of this width."""
    blocks = (width + BLOCK - 1) // BLOCK
    sums = np.zeros(KEY_TILE // BLOCK, np.float32)
    for b in range(blocks):
        sums[b] = _block_sum(p, b * BLOCK, width)
    if by_width and (width == 512 or width == 256):
        count = blocks
        while count > 1:
            count //= 2
            for b in range(count):
                sums[b] = sums[2 * b] + sums[2 * b + 1]
        return sums[0]
    total = sums[0]
    for b in range(1, blocks):
        total = total + sums[b]
    return total


@numba.njit(error_model="numpy")
def _keys(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    end: int,
    visible: int,
    scale: np.float32,
    by_width: bool,
    unmasked_from: int,
    halves: int,
    p: np.ndarray,
    rounded: np.ndarray,
    bits: np.ndarray,
    acc: np.ndarray,
) -> tuple[np.float32, np.float32]:
    """One row over keys [first, end) of [D, S] and values [S, D]: running maximum and sum; acc [D] is written."""
    top, total = _NEG_INF, _ZERO
    acc[:] = _ZERO
    for start in range(first, end, KEY_TILE):
        width = min(KEY_TILE, end - start)
        best = top
        tile = keys[:, start : start + width]
        p[:width] = _ZERO
        for d in range(query.size):
            value = query[d]
            for j in range(width):
                p[j] = p[j] + value * tile[d, j]
        for j in range(width):
            score = p[j] * scale
            if start + j >= visible and start + j < unmasked_from:
                score = score + _NEG_INF
            p[j] = score
            if score > best or score != score:
                best = score
        for j in range(width):
            p[j] = _exp(p[j] - best) if best > _NEG_INF or best != best else _ZERO
        shrink = _exp(top - best) if top > _NEG_INF else _ZERO
        total = total * shrink + row_sum(p, width, by_width)
        for d in range(query.size):
            acc[d] = acc[d] * shrink
        _round_all(p, width, halves, rounded, bits)
        for j in range(width):
            weight = rounded[j]
            for d in range(query.size):
                acc[d] = acc[d] + weight * values[start + j, d]
        top = best
    return top, total


@compiled
def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: np.float32,
    causal: bool,
    by_width: bool,
    splits: int,
    unmasked_from: int,
    halves: int,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """One sequence: q [T, H, D], k and v [S, H_kv, D] float32 -> out [T, H, D] before rounding, lse [H, T].

    Args:
        splits: parts the key tiles are cut into, combined at the end; 1: none.
        unmasked_from: key from which the causal mask is forgotten (a fault); the sequence's length or more: nowhere.
    """
    rows, heads, dim = q.shape
    length, kv_heads = k.shape[0], k.shape[1]
    group = heads // kv_heads
    keys, values = k[:, 0].T.copy(), v[:, 0].copy()
    p, acc, part = np.empty(KEY_TILE, np.float32), np.empty(dim, np.float32), np.empty(dim, np.float32)
    rounded = np.empty(KEY_TILE, np.float32)
    bits = rounded.view(np.uint32)
    for job in range(kv_heads * rows):
        kv_head, row = job // rows, job % rows
        if row == 0:
            keys, values = k[:, kv_head].T.copy(), v[:, kv_head].copy()
        end, visible = length, length
        if causal:
            end = max(0, min(length, (row // QUERY_TILE + 1) * QUERY_TILE + length - rows))
            visible = length - rows + row + 1
        tiles = (end + KEY_TILE - 1) // KEY_TILE
        for head in range(kv_head * group, (kv_head + 1) * group):
            query = q[row, head]
            top, total = _NEG_INF, _ZERO
            acc[:] = _ZERO
            for s in range(splits):
                first, last = tiles * s // splits * KEY_TILE, min(end, tiles * (s + 1) // splits * KEY_TILE)
                if first >= last or visible <= 0:
                    continue
                t, n = _keys(
                    query, keys, values, first, last, visible, scale, by_width, unmasked_from, halves,
                    p, rounded, bits, part,
                )  # fmt: skip
                best = max(top, t) if t == t else t
                a, b = (_exp(top - best) if top > _NEG_INF else _ZERO), _exp(t - best)
                if splits == 1:
                    a, b = _ZERO, np.float32(1.0)
                total = total * a + n * b
                for d in range(dim):
                    acc[d] = acc[d] * a + part[d] * b
                top = best
            for d in range(dim):
                out[row, head, d] = acc[d] / total if total != _ZERO else _ZERO
            lse[head, row] = top + np.float32(np.log(total)) if total != _ZERO else _NEG_INF
