"""The two calls of flash_attn_npu that we make, with every argument that could change a bit written out.

num_splits is always 1: 0 splits keys by batch size. scheduler_metadata is never passed: in 0.3 it ignores the scale,
later it must be remade whenever a length changes. ``k=``/``v=`` are never passed: some releases ignore them, others
reduce them in a second phase. v2's ``flash_attn_with_kvcache`` is never called: it splits decode rows and cannot be
told not to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rollout.kernels.npu.lines import CodeLine, InstalledAttention


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """The package's kernels behind one signature for all lines."""

    line: CodeLine
    version: str
    kvcache: Callable[..., Any]
    """the package's flash_attn_with_kvcache"""
    varlen: Callable[..., Any]
    """the package's flash_attn_varlen_func, of v2 on the train-infer line"""

    @classmethod
    def of(cls, installed: InstalledAttention) -> FlashAttention:
        """From a recognised installation."""
        return cls(installed.line, installed.version, installed.kvcache, installed.varlen)

    def paged(
        self,
        q: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        *,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        scale: float,
        causal: bool,
    ) -> torch.Tensor:
        """q [T, H, D], pages [P, page, H_kv, D] -> [T, H, D]; tables int32 on q's device."""
        out: torch.Tensor = self.kvcache(
            q,
            key_pages,
            value_pages,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            softmax_scale=scale,
            causal=causal,
            num_splits=1,
        )
        return out

    def packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        causal: bool,
    ) -> torch.Tensor:
        """q [T, H, D], k and v [S, H_kv, D] -> [T, H, D]; differentiable, with the deterministic backward."""
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "deterministic": True}
        options |= {"dropout_p": 0.0} if self.line.varlen_is_v2 else {"num_splits": 1}
        out: torch.Tensor = self.varlen(q, k, v, *lengths, **options)
        return out
