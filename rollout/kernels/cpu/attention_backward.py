"""Backward of causal attention in plain torch operations, one sequence and one query tile at a time.

The usual FlashAttention-2 recomputation (Dao 2023, algorithm 2): P from the saved log-sum-exp, then dV, dS, dQ, dK in
float32. Deterministic run to run; the contract asks equal bits of the forward only.
"""

from __future__ import annotations

import torch

_TILE = 256


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
    """Gradients of q [T, H, D] and k, v [S, H_kv, D]; lse float32 [H, T] as saved by the forward."""
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    q_edges, k_edges = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_edges) - 1):
        rows, keys = slice(q_edges[b], q_edges[b + 1]), slice(k_edges[b], k_edges[b + 1])
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        dq[rows], dk[keys], dv[keys] = _one_sequence(
            grad[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], scale, causal
        )  # fmt: skip
    return dq, dk, dv


def _one_sequence(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_len, heads, dim = q.shape
    k_len, kv_heads, _ = k.shape
    group = heads // kv_heads
    by_head = (kv_heads, group, q_len, dim)
    queries = q.float().transpose(0, 1).reshape(by_head)
    grads = grad.float().transpose(0, 1).reshape(by_head)
    delta = (grads * out.float().transpose(0, 1).reshape(by_head)).sum(-1)
    keys = k.float().transpose(0, 1)[:, None]
    values = v.float().transpose(0, 1)[:, None]
    lse = lse.reshape(kv_heads, group, q_len)
    dq = torch.zeros(by_head)
    dk = torch.zeros(kv_heads, k_len, dim)
    dv = torch.zeros(kv_heads, k_len, dim)
    positions = torch.arange(k_len)
    for start in range(0, q_len, _TILE):
        tile = slice(start, min(start + _TILE, q_len))
        scores = queries[:, :, tile] @ keys.transpose(-1, -2) * scale
        last = torch.arange(tile.start, tile.stop) + (k_len - q_len)
        seen = positions[None] <= last[:, None] if causal else torch.ones(len(last), k_len, dtype=torch.bool)
        probs = torch.where(seen, scores - lse[:, :, tile, None], -torch.inf).exp()
        dprobs = grads[:, :, tile] @ values.transpose(-1, -2)
        dscores = probs * (dprobs - delta[:, :, tile, None]) * scale
        dq[:, :, tile] = dscores @ keys
        dk += (dscores.transpose(-1, -2) @ queries[:, :, tile]).sum(1)
        dv += (probs.transpose(-1, -2) @ grads[:, :, tile]).sum(1)
    return (
        dq.reshape(heads, q_len, dim).transpose(0, 1).to(q.dtype),
        dk.transpose(0, 1).to(k.dtype),
        dv.transpose(0, 1).to(v.dtype),
    )
