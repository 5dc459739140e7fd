"""Fused element-wise kernels of a decoder layer, each with the bits of the unfused chain in invariant mode.

Every step of the Hugging Face modules is kept, with its rounding: the fusion saves passes over memory and calls, not
arithmetic. tests/parity proves each against the modules it stands for.
"""

from __future__ import annotations

import numba
import numpy as np

from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.elements import load, store
from rollout.kernels.cpu.numerics import exp_f32

LANES = 16
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@numba.njit(inline="always", error_model="numpy")
def _fold(lanes: np.ndarray) -> np.float32:
    total = _ZERO
    for t in range(LANES):
        total = total + lanes[t]
    return total


@compiled
def mean_rows(x: np.ndarray, out: np.ndarray) -> None:
    """out[r] = mean of row r: sums in 16 lanes by column index, folded in order. x float32 [R, N], out float32 [R]."""
    lanes = np.empty(LANES, np.float32)
    rows, columns = x.shape
    whole = columns - columns % LANES
    for r in range(rows):
        lanes[:] = _ZERO
        for c in range(0, whole, LANES):
            for t in range(LANES):
                lanes[t] = lanes[t] + x[r, c + t]
        for c in range(whole, columns):
            lanes[c - whole] = lanes[c - whole] + x[r, c]
        out[r] = _fold(lanes) / np.float32(columns)


@numba.njit(inline="always", error_model="numpy")
def _norm_row(row: np.ndarray, weight: np.ndarray, eps: np.float32, lanes: np.ndarray, out: np.ndarray) -> None:
    """LlamaRMSNorm: x / sqrt(mean(x^2) + eps), rounded, times weight, rounded."""
    columns = row.size
    whole = columns - columns % LANES
    lanes[:] = _ZERO
    for c in range(0, whole, LANES):
        for t in range(LANES):
            v = load(row[c + t])
            lanes[t] = lanes[t] + v * v
    for c in range(whole, columns):
        v = load(row[c])
        lanes[c - whole] = lanes[c - whole] + v * v
    inverse = _ONE / np.sqrt(_fold(lanes) / np.float32(columns) + eps)
    for c in range(columns):
        normed = store(load(row[c]) * inverse, row[c])
        out[c] = store(load(weight[c]) * load(normed), row[c])


@compiled
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """x, out [T, H]; weight [H]; all of the model's dtype."""
    lanes = np.empty(LANES, np.float32)
    for r in range(x.shape[0]):
        _norm_row(x[r], weight, eps, lanes, out[r])


@compiled
def add_rms_norm(residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """residual += x (rounded), out = rms_norm(residual). All [T, H] of the model's dtype."""
    lanes = np.empty(LANES, np.float32)
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            residual[r, c] = store(load(residual[r, c]) + load(x[r, c]), x[r, c])
        _norm_row(residual[r], weight, eps, lanes, out[r])


@compiled
def silu_mul(gate_up: np.ndarray, out: np.ndarray) -> None:
    """out = silu(gate) * up, rounded after each; gate_up [T, 2 I] holds gate, then up; out [T, I]."""
    inner = out.shape[1]
    for r in range(out.shape[0]):
        # Slices, so that no index needs the check for wrapping around and the loop is vectorised.
        gates, ups, row = gate_up[r, :inner], gate_up[r, inner:], out[r]
        for c in range(inner):
            gate = load(gates[c])
            active = store(gate / (_ONE + exp_f32(-gate)), gates[c])
            row[c] = store(load(active) * load(ups[c]), gates[c])


@numba.njit(inline="always", error_model="numpy")
def _rotate(head: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    """apply_rotary_pos_emb of one head: x * cos + rotate_half(x) * sin, each product and the sum rounded."""
    half = head.size // 2
    low, high = head[:half], head[half:]
    cos_low, cos_high, sin_low, sin_high = cos[:half], cos[half:], sin[:half], sin[half:]
    out_low, out_high = out[:half], out[half:]
    for d in range(half):
        a, b, like = load(low[d]), load(high[d]), low[d]
        direct = store(a * load(cos_low[d]), like)
        turned = store(-b * load(sin_low[d]), like)
        out_low[d] = load(store(load(direct) + load(turned), like))
        direct = store(b * load(cos_high[d]), like)
        turned = store(a * load(sin_high[d]), like)
        out_high[d] = load(store(load(direct) + load(turned), like))


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
        [pages, H_kv, page, D]. query: float32 [T, H, D], written.
    """
    heads, dim = query.shape[1], query.shape[2]
    kv_heads, page = key_pages.shape[1], key_pages.shape[3]
    lanes = np.empty(LANES, np.float32)
    normed = np.empty(dim, qkv.dtype)
    turned = np.empty(dim, np.float32)
    for t in range(qkv.shape[0]):
        c, s = cos[positions[t]], sin[positions[t]]
        page_id, offset = slots[t] // page, slots[t] % page
        for h in range(heads + kv_heads):
            head = qkv[t, h * dim : (h + 1) * dim]
            if q_norm.size > 0:
                _norm_row(head, q_norm if h < heads else k_norm, eps, lanes, normed)
                head = normed
            if h < heads:
                _rotate(head, c, s, query[t, h])
            else:
                _rotate(head, c, s, turned)
                column = key_pages[page_id, h - heads, :, offset]
                for d in range(dim):
                    column[d] = store(turned[d], head[d])
        values = (heads + kv_heads) * dim
        for h in range(kv_heads):
            for d in range(dim):
                value_pages[page_id, h, offset, d] = qkv[t, values + h * dim + d]
