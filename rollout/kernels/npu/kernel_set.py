"""The NPU kernel set: the contract of ``rollout.kernels.base`` on flash_attn_npu and torch_npu."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rollout.errors import ConfigError, InvalidRequest, UnsupportedFeature
from rollout.kernels.base import BoundPacked, BoundPaged, Capabilities, KernelSet, KVLayout, KVStore
from rollout.kernels.edges import FA3_NPU_EDGES, LengthEdge
from rollout.kernels.npu.attention import AttentionCalls, PreparedPass, PreparedStep, paged_calls, run_paged
from rollout.kernels.npu.capabilities import CAPABILITIES, PAGE_SIZE
from rollout.kernels.npu.fixed_shape import REDUCE_TILE, ROW_TILE
from rollout.kernels.npu.norm import bind_norms
from rollout.kernels.npu.plans import PLANS, AttentionPlan, AttentionShape, Measured, choose_plan, plan_named
from rollout.kernels.npu.runtime import NpuRuntime, load_runtime
from rollout.kernels.npu.store import NpuKVStore


class NpuKernelSet(KernelSet):
    """FA3 attention, npu_rms_norm, and products by the Ascend package or the fixed-shape plan."""

    name: ClassVar[str] = "npu"
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    device_logprobs: ClassVar[bool] = True

    def __init__(self, runtime: NpuRuntime, page_size: int = PAGE_SIZE, attention_plan: str = "auto") -> None:
        if page_size not in self.capabilities.page_sizes:
            raise ConfigError(
                f"page size {page_size} is not {PAGE_SIZE}, the only one of kernel set npu", field="engine.page_size"
            )
        self.page_size = page_size
        self.runtime = runtime
        self.device = runtime.device
        self._open = attention_plan == "auto"
        self._measured: dict[AttentionShape, tuple[Measured, ...]] = {}
        plan = plan_named(attention_plan, runtime.flash.line)
        if plan.needs_fused_infer and runtime.fused_infer is None:
            raise UnsupportedFeature(
                f"attention plan {plan.name} needs the fused-infer operator of the Ascend package batch_invariant_ops; "
                "install it (docs/npu.md) or choose kernels.attention_plan=tile_aligned",
                field="kernels.attention_plan",
            )
        self.calls = AttentionCalls(runtime.flash, plan, runtime.device, runtime.fused_infer)
        self._mode = runtime.invariant_mode()

    @property
    def plan(self) -> AttentionPlan:
        """How attention is called, on both sides."""
        return self.calls.plan

    def allocate_kv(self, layout: KVLayout) -> NpuKVStore:
        """Zeroed pages on the device.

        Raises:
            UnsupportedFeature: a dtype or head dim the kernels do not take. ConfigError: pages of another size, too
            many.
        """
        if layout.dtype not in self.capabilities.dtypes:
            raise UnsupportedFeature(f"kernel set npu holds KV in bfloat16 or float16, not {layout.dtype}")
        if layout.head_dim > self.capabilities.max_head_dim:
            raise UnsupportedFeature(
                f"head dim {layout.head_dim} exceeds {self.capabilities.max_head_dim} of kernel set npu"
            )
        if layout.page_size != self.page_size:
            raise ConfigError(
                f"KV layout has pages of {layout.page_size}, kernel set npu was made for {self.page_size}"
            )
        return NpuKVStore(layout, self.device)

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
        """One step's attention, laid out for this layer alone; an engine uses ``bind_paged``.

        Raises:
            InvalidRequest: shapes that do not fit the store, or a sequence with more rows than keys.
        """
        assert isinstance(store, NpuKVStore)
        _check_shapes(q, store.layout.num_kv_heads, store.layout.head_dim, int(cu_seqlens_q[-1]))
        calls = paged_calls(self.calls, page_table, cache_seqlens, cu_seqlens_q, causal)
        return run_paged(self.calls, calls, q.contiguous(), store, layer, softmax_scale)

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
        """Training attention under the set's plan; differentiable.

        Raises:
            InvalidRequest: shapes that do not fit each other, or a sequence with more rows than keys.
        """
        _check_shapes(q, k.size(1), k.size(2), int(cu_seqlens_q[-1]))
        if int(cu_seqlens_k[-1]) != k.size(0) or k.shape != v.shape:
            raise InvalidRequest(
                f"k {tuple(k.shape)}, v {tuple(v.shape)} do not match cu_seqlens_k end {int(cu_seqlens_k[-1])}"
            )
        return PreparedPass(self.calls, cu_seqlens_q, cu_seqlens_k, causal).attend(0, q, k, v, softmax_scale)

    def bind_paged(
        self,
        store: KVStore,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> BoundPaged:
        """Lay the step out on the host once; see ``KernelSet.bind_paged``."""
        return PreparedStep(self.calls, store, slots, page_table, cache_seqlens, cu_seqlens_q)

    def bind_packed(self, cu_seqlens: torch.Tensor) -> BoundPacked:
        """Lay the pass out once; see ``KernelSet.bind_packed``."""
        return PreparedPass(self.calls, cu_seqlens, cu_seqlens)

    def adapt(self, hf: Any) -> None:
        """RMSNorm by ``npu_rms_norm``, in row tiles under the fixed-shape plan."""
        bind_norms(hf, tiled=self.runtime.package is None)

    def invariant_mode(self) -> contextlib.AbstractContextManager[None]:
        """Process-wide, reentrant, safe across threads; see ``invariant``."""
        return self._mode()

    def length_edges(self) -> tuple[LengthEdge, ...]:
        """Where the later line's row sums, its tiles and the pages end."""
        return FA3_NPU_EDGES

    def open_plans(self) -> tuple[str, ...]:
        """Every plan that this host can run, when the setting is auto."""
        return tuple(p.name for p in self.able_plans()) if self._open else ()

    def able_plans(self) -> tuple[AttentionPlan, ...]:
        """Plans whose operators are installed, in the order in which they are tried."""
        return tuple(p for p in PLANS if not p.needs_fused_infer or self.calls.fused is not None)

    def take_plan(self, name: str) -> None:
        """See ``KernelSet.take_plan``."""
        if name not in self.open_plans():
            raise UnsupportedFeature(
                f"kernel set npu cannot take attention plan {name!r}: kernels.attention_plan is {self.plan.name}"
                if not self._open
                else f"attention plan {name!r} cannot run here; able: {', '.join(self.open_plans())}",
                field="kernels.attention_plan",
            )
        self.calls = dataclasses.replace(self.calls, plan=next(p for p in PLANS if p.name == name))

    def choose_plan(self, hf: Any) -> None:
        """Plain, tile-aligned, row by row, fused infer: the first one measured exact here; see ``KernelSet``."""
        if self._open:
            measured = {m.plan: m for m in self._measure(hf)}
            choice = choose_plan(lambda plan: measured[plan.name], self.able_plans())
            self.take_plan(choice.plan.name)

    def measured_plan(self, hf: Any) -> Mapping[str, str]:
        """What each attention plan shows on this device for this model's attention, for the certificate."""
        measured = self._measure(hf)
        first = next((m.plan for m in measured if m.compared and not m.differing), "none")
        return {
            "attention_plan": f"{self.plan.name} ({'chosen by measurement' if self._open else 'set by hand'})",
            "first exact plan": first,
            **{f"plan {m.plan}": str(m) for m in measured},
        }

    def _measure(self, hf: Any) -> tuple[Measured, ...]:
        from rollout.kernels.npu.probe import measure_plans

        config = hf.config.get_text_config()
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        shape = AttentionShape(heads, kv_heads, head_dim, hf.dtype)
        if shape not in self._measured:
            self._measured[shape] = measure_plans(self, shape)
        return self._measured[shape]

    def closer_views(self) -> tuple[tuple[str, KernelSet], ...]:
        """The softmax sums, where the plan's operators return them."""
        from rollout.kernels.npu.probe import seen_by_sums

        return () if self.plan.needs_fused_infer else (("by its sums", seen_by_sums(self)),)

    def providers(self) -> Mapping[str, str]:
        """See ``KernelSet.providers``."""
        runtime, line = self.runtime, self.runtime.flash.line
        fixed = f"aten on {ROW_TILE} rows at a time", f"aten on {REDUCE_TILE} rows at a time"
        products, softmax = ("batch_invariant_ops",) * 2 if runtime.package is not None else fixed
        return {
            "attention": f"{line.kvcache} and {line.varlen} (line {line.name}, num_splits=1)",
            "attention_plan": self.plan.name,
            "linear": products,
            "silu": "aten",
            "norm": "npu_rms_norm" + (f" on {ROW_TILE} rows at a time" if runtime.package is None else ""),
            "rope": "transformers eager",
            "log_softmax": softmax,
            "device": runtime.device_name,
            "deterministic_level": str(runtime.deterministic_level),
            "sampler": "zerodrift.cpu.sampler",
            **{f"version.{name}": version for name, version in sorted(runtime.versions.items())},
        }


def _check_shapes(q: torch.Tensor, kv_heads: int, head_dim: int, rows: int) -> None:
    if q.size(1) % kv_heads or q.size(2) != head_dim:
        raise InvalidRequest(
            f"query [T, H, D] = {tuple(q.shape)} does not fit {kv_heads} KV heads of dim {head_dim}: "
            "H must be a multiple of H_kv and D equal"
        )
    if rows != q.size(0):
        raise InvalidRequest(f"cu_seqlens_q ends at {rows}, query has {q.size(0)} rows")


def npu_kernels(page_size: int = PAGE_SIZE, attention_plan: str = "auto", invariant_ops: str = "auto") -> NpuKernelSet:
    """The set on this host's NPU; raises what ``load_runtime`` raises."""
    return NpuKernelSet(load_runtime(invariant_ops), page_size, attention_plan)
