# ruff: noqa: ANN001, ANN202 - the signatures are the package's own, which annotates nothing that we record
"""flash_attn_npu without an NPU: modules with the package's exact signatures, checks, and arithmetic of both code
lines."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollout.kernels.cpu.attention_backward import attention_backward
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.lines import InstalledAttention, recognise
from tests.rollout.kernels.npu.emulator.numerics import attend

CORES = 20
"""Cube cores of the emulated chip; they decide how num_splits = 0 cuts keys."""


@dataclass(slots=True)
class Call:
    """A recorded call of the package."""

    name: str
    q_lengths: list[int]
    k_lengths: list[int]
    arguments: dict[str, Any]


@dataclass(slots=True)
class EmulatedPackage:
    """An installation of one version; ``calls`` records what it was asked."""

    version: str = "0.4.2.post1"
    faults: frozenset[str] = frozenset()
    """"unmasked_beyond_512": the causal mask is forgotten from key 512 on"""
    calls: list[Call] = field(default_factory=list)

    @property
    def later(self) -> bool:
        """Whether the row sum depends on the width of a tile."""
        return not self.version.startswith("0.2")

    def modules(self) -> dict[str, types.ModuleType]:
        """Importable modules of this version."""
        if self.later:
            return {
                "flash_attn_npu": _module("flash_attn_npu", flash_attn_varlen_func=self._v2_varlen()),
                "flash_attn_npu_3": _module(
                    "flash_attn_npu_3",
                    flash_attn_varlen_func=self._v3_varlen(),
                    flash_attn_with_kvcache=self._kvcache(),
                ),
            }
        return {
            "flash_attn_npu": _module("flash_attn_npu", flash_attn_varlen_func=self._v2_varlen()),
            "flash_attn_npu_v3": _module("flash_attn_npu_v3", flash_attn_with_kvcache=self._kvcache()),
            # The bare C extension: importing it succeeds, and it has no attention function.
            "flash_attn_npu_3": _module("flash_attn_npu_3", fwd=lambda *a: None),
        }

    def load(self, name: str) -> types.ModuleType:
        """As ``importlib.import_module``."""
        try:
            return self.modules()[name]
        except KeyError:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None

    def installed(self) -> InstalledAttention:
        """Recognised by the code under test."""
        return recognise(self.load, lambda _: self.version)

    def flash(self) -> FlashAttention:
        """As the kernel set uses it."""
        return FlashAttention.of(self.installed())

    # ---- what the functions do ----------------------------------------------------------------------------------

    def _run(
        self,
        q: list[torch.Tensor],
        k: list[torch.Tensor],
        v: list[torch.Tensor],
        scale: float,
        causal: bool,
        splits: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outs, lses = [], []
        unmasked_from = 512 if "unmasked_beyond_512" in self.faults else 2**30
        for rows, keys, values in zip(q, k, v, strict=True):
            arrays = (np.ascontiguousarray(x.detach().float().numpy()) for x in (rows, keys, values))
            out = np.empty(rows.shape, np.float32)
            lse = np.empty((rows.size(1), rows.size(0)), np.float32)
            halves = int(rows.dtype == torch.float16)
            attend(*arrays, np.float32(scale), causal, self.later, splits, unmasked_from, halves, out, lse)
            outs.append(torch.from_numpy(out).to(rows.dtype))
            lses.append(torch.from_numpy(lse))
        return outs, lses

    def _splits(self, batch: int, kv_heads: int, group: int, max_q: int, longest: int, num_splits: int) -> int:
        """How the later line cuts keys (fa_split.h); the train-infer line never does."""
        if not self.later or num_splits == 1 or longest < 1024 or max_q > 16 or max_q * group > 128:
            return 1
        tasks = batch * kv_heads
        is_long = tasks <= 0.8 * CORES and longest >= CORES * 512
        if not is_long and tasks > 0.4 * CORES:
            return 1
        return max(1, min(CORES // tasks, -(-longest // 512))) if num_splits == 0 else num_splits

    def _kvcache(self) -> Callable[..., Any]:
        package = self

        def flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k=None,
            v=None,
            qv=None,
            rotary_cos=None,
            rotary_sin=None,
            cache_seqlens=None,
            cache_batch_idx=None,
            cache_leftpad=None,
            page_table=None,
            cu_seqlens_q=None,
            cu_seqlens_k_new=None,
            max_seqlen_q=None,
            rotary_seqlens=None,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            softmax_scale=None,
            causal=False,
            window_size=(-1, -1),
            attention_chunk=0,
            softcap=0.0,
            rotary_interleaved=True,
            scheduler_metadata=None,
            num_splits=0,
            pack_gqa=None,
            sm_margin=0,
            return_softmax_lse=False,
        ):  # fmt: skip
            given = dict(locals())
            package._check(given)
            scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
            if scheduler_metadata is not None:
                # 0.3: the metadata carries 1/sqrt(D) and no window; what the caller says is ignored.
                scale = q.shape[-1] ** -0.5
            varlen = cu_seqlens_q is not None
            queries = _split(q, cu_seqlens_q) if varlen else list(q)
            lengths = cache_seqlens.tolist()
            keys, values = (_pages(cache, page_table, lengths) for cache in (k_cache, v_cache))
            if k is not None and package.version.startswith("0.4"):
                keys, values, lengths = package._append(given, keys, values, lengths)
            package.calls.append(
                Call("flash_attn_with_kvcache", [len(x) for x in queries], lengths, {**given, "package": None})
            )
            group, kv_heads = q.shape[-2] // k_cache.shape[2], k_cache.shape[2]
            splits = 1
            if varlen and page_table is not None:
                splits = package._splits(len(queries), kv_heads, group, max_seqlen_q, max(lengths), num_splits)
            outs, lses = package._run(queries, keys, values, scale, causal, splits)
            out = torch.cat(outs) if varlen else torch.stack(outs)
            lse = torch.cat(lses, 1) if varlen else torch.stack(lses)
            return (out, lse, None, None) if return_softmax_lse else out

        return flash_attn_with_kvcache

    def _append(self, given: dict[str, Any], keys: Any, values: Any, lengths: list[int]) -> Any:
        """0.4: new keys are written behind the cached ones (their second phase of reduction is not emulated)."""
        new_k, new_v = (given[n].reshape(-1, *given[n].shape[-2:]) for n in ("k", "v"))
        edges = [0, *np.cumsum([len(x) for x in _split(given["q"], given["cu_seqlens_q"])]).tolist()]
        pieces = [(new_k[a:b], new_v[a:b]) for a, b in itertools.pairwise(edges)]
        joined = [(torch.cat((a, c)), torch.cat((b, d))) for a, b, (c, d) in zip(keys, values, pieces, strict=True)]
        return [a for a, _ in joined], [b for _, b in joined], [len(a) for a, _ in joined]

    def _check(self, given: dict[str, Any]) -> None:
        q, k, v = given["q"], given["k_cache"], given["v_cache"]
        _check_tensors(q, k, v)
        for name in (
            "cache_leftpad",
            "rotary_cos",
            "rotary_sin",
            "rotary_seqlens",
            "q_descale",
            "k_descale",
            "v_descale",
        ):
            if given[name] is not None:
                raise RuntimeError(f"{name} is not supported")
        if given["attention_chunk"] != 0 or given["pack_gqa"] is True or given["softcap"] < 0:
            raise RuntimeError("attention_chunk, pack_gqa and a negative softcap are not supported")
        if not 0 <= given["num_splits"] <= CORES:
            raise RuntimeError(f"num_splits must be in [0, {CORES}]")
        if given["cu_seqlens_q"] is not None and given["max_seqlen_q"] is None:
            raise RuntimeError("max_seqlen_q must be provided if cu_seqlens_q is provided")
        for name in ("cache_seqlens", "page_table", "cu_seqlens_q"):
            if given[name] is not None and given[name].dtype != torch.int32:
                raise RuntimeError(f"{name} must have dtype torch.int32")
        if not (k.is_contiguous() and v.is_contiguous()):
            raise RuntimeError("the kernel takes pages at block * size: K and V must be contiguous")
        windowed = tuple(given["window_size"]) != (-1, -1)
        if not self.later and (
            given["softcap"] != 0 or windowed or given["scheduler_metadata"] is not None or given["num_splits"] > 1
        ):
            raise RuntimeError("0.2.0b1 has no softcap, window, scheduler_metadata or num_splits > 1")
        if windowed or given["softcap"] != 0:
            raise NotImplementedError("the emulator knows no window and no softcap; our code passes none")

    def _v3_varlen(self) -> Callable[..., Any]:
        package = self

        def flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q=None,
            seqused_k=None,
            softmax_scale=None,
            causal=False,
            qv=None,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            window_size=(-1, -1),
            attention_chunk=0,
            softcap=0.0,
            num_splits=1,
            pack_gqa=None,
            deterministic=False,
            sm_margin=0,
            return_attn_probs=False,
        ):  # fmt: skip
            return package._varlen(dict(locals()))

        return flash_attn_varlen_func

    def _v2_varlen(self) -> Callable[..., Any]:
        package = self

        def flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=None,
            causal=False,
            window_size=(-1, -1),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
            return_attn_probs=False,
            block_table=None,
        ):  # fmt: skip
            if dropout_p != 0.0 or alibi_slopes is not None or block_table is not None:
                raise RuntimeError("dropout and alibi are not supported")
            return package._varlen(dict(locals()))

        return flash_attn_varlen_func

    def _varlen(self, given: dict[str, Any]) -> Any:
        q, k, v = given["q"], given["k"], given["v"]
        _check_tensors(q, k, v)
        if tuple(given["window_size"]) != (-1, -1) or given["softcap"] != 0:
            raise NotImplementedError("the emulator knows no window and no softcap; our code passes none")
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
            raise RuntimeError("cu_seqlens must have dtype torch.int32")
        lengths = np.diff(cu_q.numpy()).tolist(), np.diff(cu_k.numpy()).tolist()
        if given["max_seqlen_q"] < max(lengths[0]) or given["max_seqlen_k"] < max(lengths[1]):
            raise RuntimeError("max_seqlen is below a sequence's length")
        self.calls.append(Call("flash_attn_varlen_func", *lengths, {**given, "package": None}))
        scale = given["softmax_scale"] if given["softmax_scale"] is not None else q.shape[-1] ** -0.5
        out, lse = _Varlen.apply(q, k, v, cu_q, cu_k, scale, given["causal"], self)
        # v2 adds the dropped probabilities, v3 does not.
        extra = (None,) if "dropout_p" in given else ()
        return (out, lse, *extra) if given["return_attn_probs"] else out


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, cu_q, cu_k, scale, causal, package):  # noqa: ANN205
        parts = _split(q, cu_q), _split(k, cu_k), _split(v, cu_k)
        outs, lses = package._run(*parts, scale, causal, 1)
        out, lse = torch.cat(outs), torch.cat(lses, 1)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.mark_non_differentiable(lse)
        ctx.scale, ctx.causal = scale, causal
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dq, dk, dv = attention_backward(grads[0], *ctx.saved_tensors, scale=ctx.scale, causal=ctx.causal)
        return dq, dk, dv, None, None, None, None, None


def _module(name: str, **functions: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    return module


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("q, k and v must have one dtype, float16 or bfloat16")
    if q.shape[-1] > 256 or q.shape[-2] % k.shape[-2] or min(x.stride(-1) for x in (q, k, v)) != 1:
        raise RuntimeError("head dim, heads or strides are not supported")


def _split(x: torch.Tensor, cu: torch.Tensor) -> list[torch.Tensor]:
    return list(x.split(np.diff(cu.numpy()).tolist()))


def _pages(cache: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return [cache[row.long()].reshape(-1, *cache.shape[2:])[:n] for row, n in zip(table, lengths, strict=True)]
