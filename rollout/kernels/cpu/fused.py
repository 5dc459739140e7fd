"""Fused element-wise kernels of a decoder layer, each with the bits of the unfused chain in invariant mode.

Every step of the Hugging Face modules is kept, with its rounding: the fusion saves passes over memory and calls, not
arithmetic. tests/parity proves each against the modules it stands for.
"""

from __future__ import annotations

import numba
import numpy as np

from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.numerics import exp_lanes
from rollout.kernels.cpu.vector import WIDTH as LANES
from rollout.kernels.cpu.vector import in_all_lanes, put, round_lanes, sum_of_lanes, take

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def mean_rows(x: np.ndarray, out: np.ndarray) -> None:
    """out[r] = mean of row r: sums in 16 lanes by column index, folded in order. x float32 [R, N], out float32 [R]."""
    rows, columns = x.shape
    for r in range(rows):
        sums = in_all_lanes(_ZERO)
        for c in range(0, columns, LANES):
            sums = sums + take(x[r], c)
        out[r] = sum_of_lanes(sums) / np.float32(columns)


@numba.njit(inline="always", error_model="numpy")
def _norm_row(row: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """LlamaRMSNorm: x / sqrt(mean(x^2) + eps), rounded, times weight, rounded; squares summed as in ``mean_rows``."""
    columns = row.size
    sums = in_all_lanes(_ZERO)
    for c in range(0, columns, LANES):
        v = take(row, c)
        sums = sums + v * v
    inverse = in_all_lanes(_ONE / np.sqrt(sum_of_lanes(sums) / np.float32(columns) + eps))
    for c in range(0, columns, LANES):
        put(out, c, take(weight, c) * round_lanes(take(row, c) * inverse, row))


@compiled
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """x, out [T, H]; weight [H]; all of the model's dtype."""
    for r in range(x.shape[0]):
        _norm_row(x[r], weight, eps, out[r])


@compiled
def add_rms_norm(residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """residual += x (rounded), out = rms_norm(residual). All [T, H] of the model's dtype."""
    for r in range(x.shape[0]):
        for c in range(0, x.shape[1], LANES):
            put(residual[r], c, take(residual[r], c) + take(x[r], c))
        _norm_row(residual[r], weight, eps, out[r])


@compiled
def silu_mul(gate_up: np.ndarray, out: np.ndarray) -> None:
    """out = silu(gate) * up, rounded after each; gate_up [T, 2 I] holds gate, then up; out [T, I]."""
    inner = out.shape[1]
    one = in_all_lanes(_ONE)
    for r in range(out.shape[0]):
        gates, ups = gate_up[r, :inner], gate_up[r, inner:]
        for c in range(0, inner, LANES):
            gate = take(gates, c)
            put(out[r], c, round_lanes(gate / (one + exp_lanes(-gate)), gates) * take(ups, c))


@numba.njit(inline="always", error_model="numpy")
def _rotate(head: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    """apply_rotary_pos_emb of one head: x * cos + rotate_half(x) * sin, each product and the sum rounded."""
    half = head.size // 2
    low, high = head[:half], head[half:]
    for d in range(0, half, LANES):
        x, y = take(low, d), take(high, d)
        direct = round_lanes(x * take(cos[:half], d), head)
        turned = round_lanes(-y * take(sin[:half], d), head)
        put(out[:half], d, direct + turned)
        direct = round_lanes(y * take(cos[half:], d), head)
        turned = round_lanes(x * take(sin[half:], d), head)
        put(out[half:], d, direct + turned)


@compiled
def rope_and_write(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: np.float32,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    query: np.ndarray,
) -> None:
    """Split qkv, norm heads where the model does, rotate, store K and V in their pages and Q for attention.

    Args:
        qkv: [T, (H + 2 H_kv) D]. cos, sin: tables [positions, D] in the model's dtype. positions, slots: int64 [T].
        q_norm, k_norm: [D], or empty for models without. key_pages [pages, H_kv, D, page], value_pages
        [pages, H_kv, page, D]. query: [T, H, D], written. All of the model's dtype.
    """
    heads, dim = query.shape[1], query.shape[2]
    kv_heads, page = key_pages.shape[1], key_pages.shape[3]
    normed = np.empty(dim, qkv.dtype)
    turned = np.empty(dim, qkv.dtype)
    for t in range(qkv.shape[0]):
        c, s = cos[positions[t]], sin[positions[t]]
        page_id, offset = slots[t] // page, slots[t] % page
        for h in range(heads + kv_heads):
            head = qkv[t, h * dim : (h + 1) * dim]
            if q_norm.size > 0:
                _norm_row(head, q_norm if h < heads else k_norm, eps, normed)
                head = normed
            if h < heads:
                _rotate(head, c, s, query[t, h])
            else:
                _rotate(head, c, s, turned)
                column = key_pages[page_id, h - heads, :, offset]
                for d in range(dim):
                    column[d] = turned[d]
        values = (heads + kv_heads) * dim
        for h in range(kv_heads):
            row = value_pages[page_id, h, offset]
            for d in range(dim):
                row[d] = qkv[t, values + h * dim + d]
