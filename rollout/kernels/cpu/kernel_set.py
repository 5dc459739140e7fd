"""The CPU kernel set: the contract of ``rollout.kernels.base`` on the compiled kernels beside it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from rollout.errors import ConfigError, InvalidRequest, UnsupportedFeature
from rollout.kernels.base import Capabilities, Decoder, KernelSet, KVLayout, KVStore
from rollout.kernels.cpu import entries, invariant
from rollout.kernels.cpu.arrays import stored_type
from rollout.kernels.cpu.attention_backward import attention_backward
from rollout.kernels.cpu.compiler import source_digest
from rollout.kernels.cpu.decoder import ARCHITECTURES as FUSED_ARCHITECTURES
from rollout.kernels.cpu.decoder import FusedDecoder
from rollout.kernels.cpu.plan import ATTENTION_WORTH_A_THREAD, QUERY_TILE, plan_attention
from rollout.kernels.cpu.store import CpuKVStore
from rollout.kernels.cpu.team import Call
from rollout.kernels.cpu.vector import WIDTH as LANES
from rollout.kernels.edges import LengthEdge, page_edge


def _attend(
    q: torch.Tensor,
    store: CpuKVStore,
    layer: int,
    page_table: np.ndarray,
    cache_seqlens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the compiled kernel: out [T, H, D] in q's dtype and lse float32 [H, T]."""
    q, layout = q.detach().contiguous(), store.layout
    out, lse = torch.empty_like(q), torch.empty(q.size(1), q.size(0))
    plan = plan_attention(page_table, cache_seqlens, cu_seqlens_q)
    run = Call(entries.attention_entry(stored_type(q.dtype)), entries.ATTENTION_FIELDS)
    run(
        len(plan.tasks) * layout.num_kv_heads, plan.cost * q.size(1) * q.size(2), ATTENTION_WORTH_A_THREAD,
        q.data_ptr(), *store.addresses(layer), *plan.addresses, out.data_ptr(), lse.data_ptr(), q.size(0), *plan.sizes,
        QUERY_TILE, int(causal), layout.num_pages, q.size(1), layout.num_kv_heads, layout.head_dim, layout.page_size,
        scale,
    )  # fmt: skip
    return out, lse


class _VarlenAttention(torch.autograd.Function):
    """Training attention: K and V are laid out in fresh pages and go through the rollout's own kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        scale: float,
        causal: bool,
        page_size: int,
    ) -> torch.Tensor:
        cu_q, cu_k = cu_seqlens_q.numpy(), cu_seqlens_k.numpy()
        lengths = np.diff(cu_k)
        pages = (lengths + page_size - 1) // page_size
        first_page = np.cumsum(pages) - pages
        table = first_page[:, None] + np.arange(max(int(pages.max(initial=0)), 1))[None]
        layout = KVLayout(1, max(int(pages.sum()), 1), page_size, k.size(1), k.size(2), k.dtype)
        store = CpuKVStore(layout)
        within = np.arange(int(cu_k[-1])) - np.repeat(cu_k[:-1], lengths)
        slots = np.repeat(first_page, lengths) * page_size + within
        store.write(0, k, v, torch.from_numpy(slots.astype(np.int64)))
        out, lse = _attend(q, store, 0, table.astype(np.int32), lengths.astype(np.int32), cu_q, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dq, dk, dv = attention_backward(grads[0], *ctx.saved_tensors, scale=ctx.scale, causal=ctx.causal)
        return dq, dk, dv, None, None, None, None, None


class CpuKernelSet(KernelSet):
    """Rows independent by construction; bf16 and fp32; any head dim up to 256."""

    name: ClassVar[str] = "cpu"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=frozenset({torch.bfloat16, torch.float32}),
        page_sizes=frozenset({16, 32, 64, 128, 256}),
        max_head_dim=256,
        features=frozenset({"causal", "gqa", "paged", "varlen", "backward"}),
    )

    def __init__(self, page_size: int = 128) -> None:
        if page_size not in self.capabilities.page_sizes:
            raise ConfigError(
                f"page size {page_size} is not one of {sorted(self.capabilities.page_sizes)} (kernel set cpu)",
                field="engine.page_size",
            )
        self.page_size = page_size

    def allocate_kv(self, layout: KVLayout) -> CpuKVStore:
        """Zeroed pages on the host.

        Raises:
            UnsupportedFeature: a dtype the set does not hold. ConfigError: pages of another size than the set's.
        """
        if layout.dtype not in self.capabilities.dtypes:
            raise UnsupportedFeature(f"kernel set cpu holds KV in bfloat16 or float32, not {layout.dtype}")
        if layout.page_size != self.page_size:
            raise ConfigError(
                f"KV layout has pages of {layout.page_size}, kernel set cpu was made for {self.page_size}"
            )
        return CpuKVStore(layout)

    def attention_with_kvcache(
        self,
        q: torch.Tensor,
        store: KVStore,
        layer: int,
        *,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        softmax_scale: float,
        causal: bool = True,
    ) -> torch.Tensor:
        """Decode and prefill rows in one call; never split over keys.

        Raises:
            InvalidRequest: heads or head dim that do not fit the store, or rows that do not fit cu_seqlens_q.
        """
        assert isinstance(store, CpuKVStore)
        _check_shapes(q, store.layout.num_kv_heads, store.layout.head_dim, cu_seqlens_q)
        out, _ = _attend(
            q,
            store,
            layer,
            page_table.numpy(),
            cache_seqlens.numpy(),
            cu_seqlens_q.numpy(),
            softmax_scale,
            causal,
        )
        return out

    def attention_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        softmax_scale: float,
        causal: bool = True,
    ) -> torch.Tensor:
        """K and V go into pages of their own and through the paged kernel; the backward pass recomputes from lse.

        Raises:
            InvalidRequest: shapes that do not fit each other or the cu_seqlens.
        """
        _check_shapes(q, k.size(1), k.size(2), cu_seqlens_q)
        if int(cu_seqlens_k[-1]) != k.size(0) or k.shape != v.shape:
            raise InvalidRequest(
                f"k {tuple(k.shape)}, v {tuple(v.shape)} do not match cu_seqlens_k end {int(cu_seqlens_k[-1])}"
            )
        apply: Callable[..., torch.Tensor] = _VarlenAttention.apply
        return apply(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, self.page_size)

    def decoder(self, hf: Any, context_length: int) -> Decoder | None:
        """A ``FusedDecoder`` for the architectures it knows."""
        known = (hf.config.architectures or [""])[0] in FUSED_ARCHITECTURES
        return FusedDecoder(hf, context_length) if known else None

    def invariant_mode(self) -> contextlib.AbstractContextManager[None]:
        """Process-wide, reentrant, safe across threads; see ``invariant``."""
        return invariant.invariant_mode()

    def length_edges(self) -> tuple[LengthEdge, ...]:
        """Pages, which are the blocks keys are reduced in; tiles of query rows; lanes of the row sum."""
        return (
            page_edge(self.page_size),
            LengthEdge(QUERY_TILE, 0, 0, "query tile"),
            LengthEdge(LANES, 0, 0, "lanes of the row sum"),
        )

    def measured_plan(self, hf: Any) -> Mapping[str, str]:
        """The row padding of invariant products; those of the fused decoder say themselves how they multiply."""
        return {"linear.row_padding": str(invariant.ROW_TILE)}

    def providers(self) -> Mapping[str, str]:
        """See ``KernelSet.providers``."""
        return {
            "attention": f"zerodrift.cpu.paged_attention(block={self.page_size}, lanes=16, fma, num_splits=1)",
            "linear": f"aten.mm(rows padded to {invariant.ROW_TILE})",
            "silu": "zerodrift.cpu.silu",
            "norm": "transformers eager, mean in 16 lanes",
            "rope": "transformers eager, float64 cos and sin",
            "log_softmax": "zerodrift.cpu.log_softmax(chunk=256, lanes=16)",
            "source": source_digest(),
            "sampler": "zerodrift.cpu.sampler",
        }


def _check_shapes(q: torch.Tensor, kv_heads: int, head_dim: int, cu_seqlens_q: torch.Tensor) -> None:
    if q.size(1) % kv_heads or q.size(2) != head_dim:
        raise InvalidRequest(
            f"query [T, H, D] = {tuple(q.shape)} does not fit {kv_heads} KV heads of dim {head_dim}: "
            "H must be a multiple of H_kv and D equal"
        )
    if int(cu_seqlens_q[-1]) != q.size(0):
        raise InvalidRequest(f"cu_seqlens_q ends at {int(cu_seqlens_q[-1])}, query has {q.size(0)} rows")


@functools.lru_cache(maxsize=8)
def cpu_kernels(page_size: int = 128) -> CpuKernelSet:
    """One set per page size in a process."""
    return CpuKernelSet(page_size)
