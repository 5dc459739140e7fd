"""The NPU set seen through its softmax sums: what differs in a sum shows long before it shows in a rounded output.

A row sum that is off by one unit of float32 changes about one bfloat16 output in thirty thousand. The log-sum-exp of
the same calls changes in a good share of the rows, so a certificate that compares it needs few positions.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from rollout.errors import UnsupportedFeature
from rollout.kernels.base import KVLayout
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.kernel_set import NpuKernelSet
from rollout.kernels.npu.layout import differing_positions, edges, probe_lengths
from rollout.kernels.npu.plans import AttentionPlan, AttentionShape, Measured


class _Sums(FlashAttention):
    """The same calls, returning float32 log-sum-exp [T, H, 1] in place of outputs."""

    __slots__ = ()

    def paged(self, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """See ``FlashAttention.paged``."""
        outer = self.kvcache
        plain = FlashAttention(self.line, self.version, lambda *a, **o: outer(*a, **o, return_softmax_lse=True), outer)
        result: Any = plain.paged(q, *args, **options)
        return _columns(result[1])

    def packed(self, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """See ``FlashAttention.packed``."""
        outer = self.varlen
        plain = FlashAttention(self.line, self.version, outer, lambda *a, **o: outer(*a, **o, return_attn_probs=True))
        result: Any = plain.packed(q, *args, **options)
        return _columns(result[1])


def _columns(lse: torch.Tensor) -> torch.Tensor:
    return lse.transpose(0, 1).unsqueeze(-1).contiguous()


def seen_by_sums(kernels: NpuKernelSet) -> NpuKernelSet:
    """The same set, plan and calls; both attention methods return log-sum-exp, float32 [T, H, 1].

    Raises:
        UnsupportedFeature: the fused-infer plan, whose operator is not asked for sums.
    """
    if kernels.plan.needs_fused_infer:
        raise UnsupportedFeature("the fused-infer plan calls an operator without sums; compare its outputs")
    twin, calls = copy.copy(kernels), kernels.calls
    flash = _Sums(calls.flash.line, calls.flash.version, calls.flash.kvcache, calls.flash.varlen)
    twin.calls = dataclasses.replace(calls, flash=flash)
    return twin


# ---- measuring plans on the device ------------------------------------------------------------------------------


def probe_positions(longest: int) -> list[int]:
    """Positions whose decode rows are compared: around every edge, and a share of those the later line fails at."""
    around = {length - 1 for length in probe_lengths(longest)}
    return sorted(around | set(differing_positions(longest)[::7]))


def measure(kernels: NpuKernelSet, plan: AttentionPlan, shape: AttentionShape) -> Measured:
    """Decode rows against the training pass under a plan, on the set's device: outputs, and sums where the plan has
    any."""
    twin = copy.copy(kernels)
    twin.calls = dataclasses.replace(kernels.calls, plan=plan)
    start, differing, compared = time.perf_counter(), 0, 0
    for view in (twin,) if plan.needs_fused_infer else (twin, seen_by_sums(twin)):
        for decoded, trained in _pairs(view, shape):
            kind = torch.int32 if decoded.element_size() == 4 else torch.int16
            differing += int((decoded.contiguous().view(kind) != trained.contiguous().view(kind)).sum())
            compared += decoded.numel()
    return Measured(plan.name, differing, compared, time.perf_counter() - start)


@torch.no_grad()
def _pairs(kernels: NpuKernelSet, shape: AttentionShape) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator, n = torch.Generator().manual_seed(0), shape.longest

    def rows(heads: int) -> torch.Tensor:
        return torch.randn(n, heads, shape.head_dim, generator=generator).to(shape.dtype).to(kernels.device)

    q, k, v = rows(shape.heads), rows(shape.kv_heads), rows(shape.kv_heads)
    scale, cu = shape.head_dim**-0.5, torch.tensor([0, n], dtype=torch.int32)
    trained = kernels.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=scale)
    pages = -(-n // kernels.page_size)
    store = kernels.allocate_kv(
        KVLayout(1, pages, kernels.page_size, shape.kv_heads, shape.head_dim, shape.dtype)
    )  # fmt: skip
    store.write(0, k, v, torch.arange(n))
    positions = torch.tensor(probe_positions(n))
    for part in positions.split(64):
        decoded = kernels.attention_with_kvcache(
            q[part.to(q.device)],
            store,
            0,
            page_table=torch.arange(pages, dtype=torch.int32).expand(len(part), -1).contiguous(),
            cache_seqlens=(part + 1).to(torch.int32),
            cu_seqlens_q=torch.from_numpy(edges([1] * len(part))),
            softmax_scale=scale,
        )
        yield decoded, trained[part.to(trained.device)]


def measure_plans(kernels: NpuKernelSet, shape: AttentionShape) -> tuple[Measured, ...]:
    """Every plan that this host can run, in order."""
    return tuple(measure(kernels, plan, shape) for plan in kernels.able_plans())
