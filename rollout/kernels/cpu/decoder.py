"""The rollout's fused forward of Llama-like decoders: the Hugging Face modules' parameters, far fewer operations.

Bit for bit the modules' own forward in invariant mode; the training side keeps running the modules themselves.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from rollout.kernels.base import KVStore
from rollout.kernels.cpu import fused
from rollout.kernels.cpu.arrays import array_of
from rollout.kernels.cpu.attention import paged_attention
from rollout.kernels.cpu.invariant import invariant_mode
from rollout.kernels.cpu.linear import LinearPlan, RolloutLinear
from rollout.kernels.cpu.parallel import run_split
from rollout.kernels.cpu.plan import QUERY_TILE, WORTH_A_THREAD, AttentionPlan, plan_attention
from rollout.kernels.cpu.store import CpuKVStore

log = logging.getLogger(__name__)
ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ROWS_WORTH_A_THREAD = 48


class _Layer:
    """Parameters of one decoder layer, as the kernels take them."""

    def __init__(self, layer: Any, plan: LinearPlan) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = plan.build([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = plan.build([attention.o_proj])[0]
        self.gate_up = plan.build([mlp.gate_proj, mlp.up_proj])
        self.down = plan.build([mlp.down_proj])[0]
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.scale = float(attention.scaling)

    def linears(self) -> list[RolloutLinear]:
        return [*self.qkv, self.o, *self.gate_up, self.down]


def _apply(linears: list[RolloutLinear], x: torch.Tensor) -> torch.Tensor:
    return linears[0](x) if len(linears) == 1 else torch.cat([linear(x) for linear in linears], dim=1)


def _eps(norm: Any) -> np.float32:
    return np.float32(norm.variance_epsilon)


class FusedDecoder:
    """Runs steps for one model. Weights are read in place, so ``refresh`` must follow a weight update."""

    def __init__(self, hf: Any, context_length: int) -> None:
        self._model = hf.get_decoder()
        plan = LinearPlan()
        self._layers = [_Layer(layer, plan) for layer in self._model.layers]
        self._head = plan.build([hf.get_output_embeddings()])[0]
        config = hf.config
        self._heads = int(config.num_attention_heads)
        self._dtype: torch.dtype = self._model.embed_tokens.weight.dtype
        self._cos, self._sin = self._rope_tables(context_length)
        self._none = array_of(torch.empty(0, dtype=self._dtype))
        log.info("rollout linear plan: %s", plan.summary)

    @torch.no_grad()
    def _rope_tables(self, context_length: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of every position, [context, D], by the model's own rotary module."""
        positions = torch.arange(context_length)[None]
        with invariant_mode():
            cos, sin = self._model.rotary_emb(torch.empty(1, dtype=self._dtype), positions)
        return array_of(cos[0].contiguous()), array_of(sin[0].contiguous())

    def refresh(self) -> None:
        """Repack after the parameters changed."""
        for layer in self._layers:
            for linear in layer.linears():
                linear.refresh()
        self._head.refresh()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """lm_head in the model's dtype: [N, hidden] -> [N, >= vocab]."""
        return self._head(hidden)

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        store: KVStore,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Decoder.hidden_states``."""
        assert isinstance(store, CpuKVStore)
        plan = plan_attention(
            page_table.numpy(), cache_seqlens.numpy(), cu_seqlens_q.numpy(), store.layout.num_kv_heads
        )  # fmt: skip
        residual = self._model.embed_tokens(input_ids)
        x = torch.empty_like(residual)
        where = positions.numpy(), slots.numpy()
        self._norm(residual, self._layers[0].input_norm, x)
        for i, layer in enumerate(self._layers):
            attended = self._attention(layer, i, x, where, store, plan)
            self._add_norm(residual, layer.o(attended), layer.post_norm, x)
            last = i + 1 == len(self._layers)
            following = self._model.norm if last else self._layers[i + 1].input_norm
            self._add_norm(residual, layer.down(self._gated(_apply(layer.gate_up, x))), following, x)
        return x

    def _norm(self, x: torch.Tensor, norm: Any, out: torch.Tensor) -> None:
        fused.rms_norm(array_of(x), array_of(norm.weight), _eps(norm), array_of(out))

    def _add_norm(self, residual: torch.Tensor, x: torch.Tensor, norm: Any, out: torch.Tensor) -> None:
        arrays = array_of(residual), array_of(x), array_of(out)
        weight, eps = array_of(norm.weight), _eps(norm)

        def part(first: int, last: int) -> None:
            r, y, o = (a[first:last] for a in arrays)
            fused.add_rms_norm(r, y, weight, eps, o)

        _over_rows(part, x.size(0))

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate_up.size(0), gate_up.size(1) // 2, dtype=gate_up.dtype)
        source, target = array_of(gate_up), array_of(out)
        _over_rows(lambda first, last: fused.silu_mul(source[first:last], target[first:last]), gate_up.size(0))
        return out

    def _attention(
        self,
        layer: _Layer,
        index: int,
        x: torch.Tensor,
        where: tuple[np.ndarray, np.ndarray],
        store: CpuKVStore,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        qkv = _apply(layer.qkv, x)
        pages = store.arrays(index)
        rows, dim = x.size(0), store.layout.head_dim
        query = np.empty((rows, self._heads, dim), np.float32)
        q_norm = array_of(layer.q_norm.weight) if layer.q_norm is not None else self._none
        k_norm = array_of(layer.k_norm.weight) if layer.k_norm is not None else self._none
        eps = _eps(layer.q_norm) if layer.q_norm is not None else np.float32(0)
        source, (positions, slots) = array_of(qkv), where

        def rotate(first: int, last: int) -> None:
            fused.rope_and_write(
                source[first:last], self._cos, self._sin, positions[first:last], slots[first:last], q_norm, k_norm, eps,
                *pages, query[first:last],
            )  # fmt: skip

        _over_rows(rotate, rows)
        out = torch.empty(rows, self._heads * dim)
        lse = np.empty((self._heads, rows), np.float32)
        target = out.numpy().reshape(rows, self._heads, dim)

        def attend(first: int, last: int) -> None:
            paged_attention(
                query, *pages, *plan.arrays, QUERY_TILE, first, last, np.float32(layer.scale), True, target, lse
            )

        run_split(attend, plan.costs, worth=WORTH_A_THREAD)
        return out.to(self._dtype)


def _over_rows(part: Any, rows: int) -> None:
    if rows < 2 * _ROWS_WORTH_A_THREAD:
        part(0, rows)
    else:
        run_split(part, np.ones(rows, np.int64), worth=_ROWS_WORTH_A_THREAD)
