"""The NPU set seen through its softmax sums: what differs in a sum shows long before it shows in a rounded output.

A row sum that is off by one unit of float32 changes about one bfloat16 output in thirty thousand. The log-sum-exp of
the same calls changes in a good share of the rows, so a certificate that compares it needs few positions.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from rollout.errors import UnsupportedFeature
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.kernel_set import NpuKernelSet
from rollout.kernels.npu.layout import differing_positions, probe_lengths

__all__ = ["differing_positions", "probe_lengths", "seen_by_sums"]


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
