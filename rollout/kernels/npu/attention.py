"""Attention of a step on the NPU: calls laid out once on the host, then the same for every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout.kernels.base import KVLayout, KVStore
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.fused_infer import fused_infer
from rollout.kernels.npu.layout import CallLayout, check_lengths, edges, plain, row_by_row, tile_aligned
from rollout.kernels.npu.plans import FUSED_INFER, ROW_BY_ROW, TILE_ALIGNED, AttentionPlan
from rollout.kernels.npu.store import NpuKVStore, begun_pages

PAGE = 128
"""tokens"""


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Which kernels, where, and laid out how."""

    flash: FlashAttention
    plan: AttentionPlan
    device: torch.device
    fused: Callable[..., Any] | None
    """the batch-invariant fused-infer operator, for the plan that needs it"""


@dataclass(frozen=True, slots=True)
class PagedCall:
    """A layout with its tensors on the device."""

    layout: CallLayout
    source: torch.Tensor
    """int64 [n] rows of the step"""
    target: torch.Tensor
    """int64 [n] rows of the call"""
    page_table: torch.Tensor
    """int32 [b, pages]"""
    cache_seqlens: torch.Tensor
    """int32 [b]"""
    cu_seqlens_q: torch.Tensor
    """int32 [b + 1]"""
    causal: bool


def paged_calls(
    calls: AttentionCalls,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    causal: bool = True,
) -> tuple[PagedCall, ...]:
    """Lay out a step's host tables: decode rows in one call, prefill rows in another, never both in one.

    Raises:
        InvalidRequest: a sequence with more rows than keys.
    """
    q_lengths = np.diff(cu_seqlens_q.cpu().numpy()).astype(np.int32)
    k_lengths = cache_seqlens.cpu().numpy().astype(np.int32)
    check_lengths(q_lengths, k_lengths)
    lay_out = plain
    if causal and calls.plan in (TILE_ALIGNED, ROW_BY_ROW):
        lay_out = tile_aligned if calls.plan is TILE_ALIGNED else row_by_row
    groups = [np.flatnonzero(q_lengths == 1), np.flatnonzero(q_lengths > 1)]
    layouts = [lay_out(group, q_lengths, k_lengths) for group in groups if len(group)]
    table = page_table.cpu().numpy()
    return tuple(_on_device(layout, table, calls.device, causal) for layout in layouts)


def _on_device(layout: CallLayout, table: np.ndarray, device: torch.device, causal: bool) -> PagedCall:
    arrays = layout.source, layout.target, table[layout.sequences], layout.k_lengths, layout.cu_seqlens_q
    source, target, pages, keys, queries = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays)
    return PagedCall(layout, source, target, pages, keys, queries, causal)


def run_paged(
    calls: AttentionCalls, prepared: tuple[PagedCall, ...], q: torch.Tensor, store: NpuKVStore, layer: int, scale: float
) -> torch.Tensor:
    """Attend rows q [T, H, D] to written pages of a layer -> [T, H, D]."""
    result: torch.Tensor | None = None
    for call in prepared:
        rows, layout = q, call.layout
        if not layout.whole:
            rows = q.new_zeros(layout.rows, *q.shape[1:]).index_copy_(0, call.target, q.index_select(0, call.source))
        out = _one_call(calls, call, rows, store.keys[layer], store.values[layer], scale)
        if layout.whole:
            return out
        if result is None:
            result = out.new_empty(q.size(0), *out.shape[1:])
        result.index_copy_(0, call.source, out.index_select(0, call.target))
    return torch.empty_like(q) if result is None else result


def _one_call(
    calls: AttentionCalls, call: PagedCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    layout = call.layout
    if calls.plan is FUSED_INFER:
        assert calls.fused is not None
        return fused_infer(
            calls.fused,
            q,
            keys,
            values,
            page_table=call.page_table,
            q_ends=layout.cu_seqlens_q[1:].tolist(),
            k_lengths=layout.k_lengths.tolist(),
            scale=scale,
            causal=call.causal,
        )
    return calls.flash.paged(
        q,
        keys,
        values,
        page_table=call.page_table,
        cache_seqlens=call.cache_seqlens,
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=layout.max_seqlen_q,
        scale=scale,
        causal=call.causal,
    )


class PreparedStep:
    """A rollout step: what is the same for every layer is on the device once."""

    def __init__(
        self,
        calls: AttentionCalls,
        store: KVStore,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> None:
        assert isinstance(store, NpuKVStore)
        self._calls = calls
        self._store = store
        self._slots = slots.to(calls.device)
        self._begun = torch.from_numpy(begun_pages(slots.cpu().numpy(), store.layout.page_size)).to(calls.device)
        self._prepared = paged_calls(calls, page_table, cache_seqlens, cu_seqlens_q)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Clear the pages that begin in this step, then store its rows."""
        self._store.clear(layer, self._begun)
        self._store.put(layer, k, v, self._slots)

    def read(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``rollout.kernels.base.BoundPaged``."""
        return run_paged(self._calls, self._prepared, q.contiguous(), self._store, layer, scale)


# ---- training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Where rows stand in a padded array of ``total`` rows."""

    target: torch.Tensor
    """int64 [n] on the device"""
    total: int
    cu_seqlens: torch.Tensor
    """int32 [B + 1] of the padded array, on the device"""
    longest: int
    padded: bool

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...] among zeros: [total, ...]; differentiable."""
        if not self.padded:
            return x
        return x.new_zeros(self.total, *x.shape[1:]).index_copy(0, self.target, x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of ``spread``."""
        return x.index_select(0, self.target) if self.padded else x


class PreparedPass:
    """A pass over packed sequences; q and k lengths may differ, keys being the longer ones."""

    def __init__(
        self, calls: AttentionCalls, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, causal: bool = True
    ) -> None:
        self._calls = calls
        self._causal = causal
        q_lengths, k_lengths = (np.diff(cu.cpu().numpy()).astype(np.int32) for cu in (cu_seqlens_q, cu_seqlens_k))
        check_lengths(q_lengths, k_lengths)
        self._lengths = q_lengths, k_lengths
        everyone = np.arange(len(q_lengths))
        lay_out = tile_aligned if causal and calls.plan is TILE_ALIGNED else plain
        layout = lay_out(everyone, q_lengths, k_lengths)
        self._queries = self._rows(layout.target, layout.q_lengths)
        self._keys = self._rows(_starts(k_lengths, layout.k_lengths), layout.k_lengths)

    def _rows(self, target: np.ndarray, lengths: np.ndarray) -> Rows:
        total, device = int(lengths.sum()), self._calls.device
        return Rows(
            torch.from_numpy(target).to(device),
            total,
            torch.from_numpy(edges(lengths)).to(device),
            int(lengths.max(initial=0)),
            padded=len(target) != total,
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``rollout.kernels.base.BoundPacked``; differentiable."""
        if self._causal and self._calls.plan in (ROW_BY_ROW, FUSED_INFER):
            apply: Callable[..., torch.Tensor] = _ExactForward.apply
            return apply(q, k, v, self, scale)
        return self.varlen(q, k, v, scale)

    def varlen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """The package's training kernel."""
        queries, keys = self._queries, self._keys
        out = self._calls.flash.packed(
            queries.spread(q.contiguous()),
            keys.spread(k.contiguous()),
            keys.spread(v.contiguous()),
            cu_seqlens_q=queries.cu_seqlens,
            cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_q=queries.longest,
            max_seqlen_k=keys.longest,
            scale=scale,
            causal=self._causal,
        )
        return queries.gather(out)

    def paged(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """The rollout's kernels, over pages of this pass's own."""
        q_lengths, k_lengths = self._lengths
        pages = -(-k_lengths // PAGE)
        first = np.cumsum(pages) - pages
        layout = KVLayout(1, max(int(pages.sum()), 1), PAGE, k.size(1), k.size(2), k.dtype)
        store = NpuKVStore(layout, self._calls.device)
        slots = np.concatenate([f * PAGE + np.arange(n) for f, n in zip(first, k_lengths, strict=True)])
        store.put(0, k, v, torch.from_numpy(slots.astype(np.int64)).to(self._calls.device))
        table = (first[:, None] + np.arange(int(pages.max()))[None]).clip(max=int(pages.sum()) - 1).astype(np.int32)
        host = torch.from_numpy(table), torch.from_numpy(k_lengths), torch.from_numpy(edges(q_lengths))
        return run_paged(self._calls, paged_calls(self._calls, *host), q.contiguous(), store, 0, scale)


def _starts(lengths: np.ndarray, padded: np.ndarray) -> np.ndarray:
    """int64 [sum(lengths)] places of rows that keep the front of each padded sequence."""
    offsets = np.cumsum(padded) - padded
    parts = [o + np.arange(n) for o, n in zip(offsets, lengths, strict=True)]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


class _ExactForward(torch.autograd.Function):
    """Values from the rollout's kernels, gradients from the package's training kernel."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: PreparedPass, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.bound, ctx.scale = bound, scale
        return bound.paged(q, k, v, scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.bound.varlen(*inputs, ctx.scale)
        return (*torch.autograd.grad(out, inputs, grads[0]), None, None)
