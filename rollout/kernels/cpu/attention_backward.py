"""Backward of causal attention on CPU, compiled, one (sequence, KV head) at a time.

The usual FlashAttention-2 recomputation (Dao 2023, algorithm 2) in float32: P from the saved log-sum-exp, then dV, dP,
dS, dQ and dK. Rows are taken in order, so gradients are the same from run to run; the contract asks equal bits of the
forward only.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.numerics import exp_f32
from rollout.kernels.cpu.parallel import run_split

_ZERO = np.float32(0.0)
_NEG_INF = np.float32(-np.inf)
_WORTH_A_THREAD = 4096


@numba.njit(inline="always", error_model="numpy")
def _dots(vector: np.ndarray, columns: np.ndarray, count: int, out: np.ndarray) -> None:
    """out[j] = sum_d vector[d] * columns[d, j] for j < count."""
    for j in range(count):
        out[j] = _ZERO
    for d in range(vector.size):
        v = vector[d]
        for j in range(count):
            out[j] = out[j] + v * columns[d, j]


@numba.njit
def _weighted_rows(weights: np.ndarray, rows: np.ndarray, count: int, out: np.ndarray) -> None:
    """out += sum_j weights[j] * rows[j] for j < count."""
    for j in range(count):
        w = weights[j]
        for d in range(out.size):
            out[d] = out[d] + w * rows[j, d]


@numba.njit
def _outer(weights: np.ndarray, vector: np.ndarray, count: int, out: np.ndarray) -> None:
    """out[j] += weights[j] * vector for j < count."""
    for j in range(count):
        w = weights[j]
        for d in range(vector.size):
            out[j, d] = out[j, d] + w * vector[d]


@numba.njit(inline="always", error_model="numpy")
def _row_backward(
    query: np.ndarray,
    grad: np.ndarray,
    out: np.ndarray,
    lse: np.float32,
    keys_t: np.ndarray,
    values_t: np.ndarray,
    keys: np.ndarray,
    count: int,
    scale: np.float32,
    probs: np.ndarray,
    dscores: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
) -> None:
    """One query row against its first ``count`` keys; adds to dk, dv [S, D] and writes dq [D]."""
    _dots(query, keys_t, count, probs)
    _dots(grad, values_t, count, dscores)
    delta = _ZERO
    for d in range(grad.size):
        delta += grad[d] * out[d]
    for j in range(count):
        probs[j] = exp_f32(probs[j] * scale - lse)
        dscores[j] = probs[j] * (dscores[j] - delta) * scale
    dq[:] = _ZERO
    _weighted_rows(dscores, keys, count, dq)
    _outer(dscores, query, count, dk)
    _outer(probs, grad, count, dv)


@compiled
def _backward_jobs(
    first_job: int,
    last_job: int,
    grad: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    cu_q: np.ndarray,
    cu_k: np.ndarray,
    scale: np.float32,
    causal: bool,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
) -> None:
    """Jobs are sequence * H_kv + KV head; all arrays float32, grad, query, out [T, H, D], key, value [S, H_kv, D]."""
    kv_heads, dim = key.shape[1], key.shape[2]
    group = query.shape[1] // kv_heads
    for job in range(first_job, last_job):
        seq, kv_head = job // kv_heads, job % kv_heads
        q_len, k_len = cu_q[seq + 1] - cu_q[seq], cu_k[seq + 1] - cu_k[seq]
        keys, values = np.empty((k_len, dim), np.float32), np.empty((k_len, dim), np.float32)
        for j in range(k_len):
            keys[j] = key[cu_k[seq] + j, kv_head]
            values[j] = value[cu_k[seq] + j, kv_head]
        keys_t, values_t = keys.T.copy(), values.T.copy()
        dkeys, dvalues = np.zeros((k_len, dim), np.float32), np.zeros((k_len, dim), np.float32)
        probs, dscores = np.empty(k_len, np.float32), np.empty(k_len, np.float32)
        for i in range(q_len):
            count = min(k_len, k_len - q_len + i + 1) if causal else k_len
            row = cu_q[seq] + i
            for g in range(group):
                head = kv_head * group + g
                if count <= 0 or lse[head, row] == _NEG_INF:
                    dq[row, head] = _ZERO
                    continue
                _row_backward(
                    query[row, head], grad[row, head], out[row, head], lse[head, row], keys_t, values_t, keys, count,
                    scale, probs, dscores, dq[row, head], dkeys, dvalues,
                )  # fmt: skip
        for j in range(k_len):
            dk[cu_k[seq] + j, kv_head] = dkeys[j]
            dv[cu_k[seq] + j, kv_head] = dvalues[j]


def _float(x: torch.Tensor) -> np.ndarray:
    array: np.ndarray = x.detach().float().contiguous().numpy()
    return array


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [T, H, D] and k, v [S, H_kv, D], each in its tensor's dtype; lse float32 [H, T] of the forward."""
    dq, dk, dv = (np.empty(x.shape, np.float32) for x in (q, k, v))
    cu_q, cu_k = cu_seqlens_q.numpy(), cu_seqlens_k.numpy()
    arrays = _float(grad), _float(q), _float(k), _float(v), _float(out), lse.numpy(), cu_q, cu_k

    def part(first: int, last: int) -> None:
        _backward_jobs(first, last, *arrays, np.float32(scale), causal, dq, dk, dv)

    costs = np.repeat(np.diff(cu_q).astype(np.int64) * np.diff(cu_k), k.size(1))
    run_split(part, costs, worth=_WORTH_A_THREAD)
    return (
        torch.from_numpy(dq).to(q.dtype),
        torch.from_numpy(dk).to(k.dtype),
        torch.from_numpy(dv).to(v.dtype),
    )
