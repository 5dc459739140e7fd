"""The fused-infer attention operator over our pages: layout TND, causality by an explicit mask, lengths as host
lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

CAUSAL_MASK = 2048
"""Side of the compressed mask that sparse_mode 3 (aligned bottom-right) asks for."""
SPARSE_RIGHT_DOWN = 3


@functools.lru_cache(maxsize=4)
def causal_mask(device: torch.device) -> torch.Tensor:
    """bool [2048, 2048], True above the diagonal: the operator hides what is True."""
    return torch.ones(CAUSAL_MASK, CAUSAL_MASK, dtype=torch.bool, device=device).triu_(1)


def fused_infer(
    operator: Callable[..., Any],
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    *,
    page_table: torch.Tensor,
    q_ends: Sequence[int],
    k_lengths: Sequence[int],
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Paged attention of q [T, H, D] over pages [P, page, H_kv, D] -> [T, H, D].

    Args:
        operator: ``npu_fused_infer_attention_score`` or its batch-invariant twin.
        q_ends: end row of each sequence, without a leading 0. k_lengths: keys of each sequence, not summed.
    """
    pages, page_size, kv_heads, dim = key_pages.shape
    mask: dict[str, Any] = {}
    if causal:
        mask = {"atten_mask": causal_mask(q.device), "sparse_mode": SPARSE_RIGHT_DOWN}
    out: torch.Tensor = operator(
        q,
        key_pages.view(pages, page_size, kv_heads * dim),
        value_pages.view(pages, page_size, kv_heads * dim),
        actual_seq_lengths=list(q_ends),
        actual_seq_lengths_kv=list(k_lengths),
        block_table=page_table,
        num_heads=q.size(1),
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout="TND",
        block_size=page_size,
        **mask,
    )[0]
    return out
