"""The rollout's fused forward of Llama-like decoders: the Hugging Face modules' parameters, far fewer operations.

Bit for bit the modules' own forward in invariant mode; the training side keeps running the modules themselves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout.kernels.base import KVStore, Product
from rollout.kernels.cpu import entries
from rollout.kernels.cpu.arrays import stored_type
from rollout.kernels.cpu.invariant import invariant_mode
from rollout.kernels.cpu.linear import LinearPlan, RolloutLinear
from rollout.kernels.cpu.plan import ATTENTION_WORTH_A_THREAD, QUERY_TILE, AttentionPlan, plan_attention
from rollout.kernels.cpu.store import CpuKVStore
from rollout.kernels.cpu.team import Call

log = logging.getLogger(__name__)
ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_WORTH_A_THREAD = 16384
"""Elements from which handing half of them to a second thread pays."""


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
        self.eps = float(np.float32(self.q_norm.variance_epsilon)) if self.q_norm is not None else 0.0

    def linears(self) -> list[RolloutLinear]:
        return [*self.qkv, self.o, *self.gate_up, self.down]

    def products(self) -> list[Product]:
        groups = ("q_proj+k_proj+v_proj", self.qkv), ("gate_proj+up_proj", self.gate_up)
        found = [self.o.described("o_proj"), self.down.described("down_proj")]
        for names, linears in groups:
            # Stacked where that is exact, else one by one.
            parts = [names] if len(linears) == 1 else names.split("+")
            found += [linear.described(name) for name, linear in zip(parts, linears, strict=True)]
        return found


def _apply(linears: list[RolloutLinear], x: torch.Tensor) -> torch.Tensor:
    return linears[0](x) if len(linears) == 1 else torch.cat([linear(x) for linear in linears], dim=1)


def _address(parameter: Any) -> int:
    return int(parameter.weight.data_ptr()) if parameter is not None else 0


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What all layers of a step share."""

    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]"""
    plan: AttentionPlan
    query: torch.Tensor
    """[T, H, D] scratch"""
    attended: torch.Tensor
    """[T, H D] scratch"""
    gated: torch.Tensor
    """[T, I] scratch"""

    @property
    def rows(self) -> int:
        return self.positions.numel()

    def only(self, rows: torch.Tensor) -> _StepInputs:
        """The same for some of the rows, which must be the last ones of their sequences."""
        table, seqlens, edges, _ = self.plan.arrays
        kept = np.searchsorted(rows.numpy(), edges).astype(np.int32)
        return _StepInputs(
            self.positions[rows], self.slots[rows], plan_attention(table, seqlens, kept), self.query[rows],
            self.attended[: len(rows)], self.gated[: len(rows)],
        )  # fmt: skip

    def ends_of_sequences(self, rows: torch.Tensor) -> bool:
        """Whether ``rows`` are, for every sequence, its last ones."""
        edges = self.plan.cu_seqlens_q
        first, last = np.searchsorted(rows.numpy(), edges[:-1]), np.searchsorted(rows.numpy(), edges[1:])
        wanted = np.concatenate([np.arange(e - n, e) for e, n in zip(edges[1:], last - first, strict=True)])
        return bool(np.array_equal(wanted, rows.numpy()))


class FusedDecoder:
    """Runs steps for one model, one at a time. Weights are read in place; ``refresh`` must follow a weight update."""

    def __init__(self, hf: Any, context_length: int) -> None:
        self._model = hf.get_decoder()
        plan = LinearPlan()
        self._layers = [_Layer(layer, plan) for layer in self._model.layers]
        self._head = plan.build([hf.get_output_embeddings()])[0]
        self._heads = int(hf.config.num_attention_heads)
        self._inner = int(hf.config.intermediate_size)
        self._dtype: torch.dtype = self._model.embed_tokens.weight.dtype
        self._eps = float(np.float32(self._model.norm.variance_epsilon))
        self._cos, self._sin = self._rope_tables(context_length)
        stored = stored_type(self._dtype)
        self._add_norm = Call(entries.add_norm_entry(stored), entries.NORM_FIELDS)
        self._gate = Call(entries.gated_entry(stored), entries.GATED_FIELDS)
        self._rotate = Call(entries.rope_entry(stored), entries.ROPE_FIELDS)
        self._attend = Call(entries.attention_entry(stored), entries.ATTENTION_FIELDS)
        log.info("rollout linear plan: %s", plan.summary)

    @torch.no_grad()
    def _rope_tables(self, context_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every position, [context, D], by the model's own rotary module."""
        positions = torch.arange(context_length)[None]
        with invariant_mode():
            cos, sin = self._model.rotary_emb(torch.empty(1, dtype=self._dtype), positions)
        return cos[0].contiguous(), sin[0].contiguous()

    def refresh(self) -> None:
        """Repack after the parameters changed."""
        for layer in self._layers:
            for linear in layer.linears():
                linear.refresh()
        self._head.refresh()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """lm_head in the model's dtype: [N, hidden] -> [N, >= vocab]."""
        return self._head(hidden)

    def products(self) -> list[Product]:
        """See ``Decoder.products``: of the first layer with each shape, and the head."""
        kinds = {(p.name, p.shape): p for layer in reversed(self._layers) for p in layer.products()}
        return [*kinds.values(), self._head.described("lm_head")]

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        store: KVStore,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Decoder.hidden_states``."""
        assert isinstance(store, CpuKVStore)
        layout, rows = store.layout, input_ids.numel()
        tables = page_table.numpy(), cache_seqlens.numpy(), cu_seqlens_q.numpy()
        step = _StepInputs(
            positions=positions,
            slots=slots,
            plan=plan_attention(*tables),
            query=torch.empty(rows, self._heads, layout.head_dim, dtype=self._dtype),
            attended=torch.empty(rows, self._heads * layout.head_dim, dtype=self._dtype),
            gated=torch.empty(rows, self._inner, dtype=self._dtype),
        )
        residual = torch.nn.functional.embedding(input_ids, self._model.embed_tokens.weight)
        x = torch.empty_like(residual)
        self._norm(residual, None, self._layers[0].input_norm, x)
        for i, layer in enumerate(self._layers):
            last = i + 1 == len(self._layers)
            self._write_and_rotate(layer, i, x, step, store)
            if last and output_rows is not None and len(output_rows) < rows:
                # What the last layer adds to other rows nobody reads: their keys and values are written by now.
                if not step.ends_of_sequences(output_rows):
                    return self._rest(layer, i, residual, x, step, store)[output_rows]
                step, residual, x = step.only(output_rows), residual[output_rows], x[: len(output_rows)]
            x = self._rest(layer, i, residual, x, step, store)
        return x

    def _rest(
        self, layer: _Layer, index: int, residual: torch.Tensor, x: torch.Tensor, step: _StepInputs, store: CpuKVStore
    ) -> torch.Tensor:
        """A layer from its rotated queries on; x is overwritten with the next layer's normed input."""
        if step.rows:
            self._norm(residual, layer.o(self._attention(layer, index, step, store)), layer.post_norm, x)
            last = index + 1 == len(self._layers)
            following = self._model.norm if last else self._layers[index + 1].input_norm
            self._norm(residual, layer.down(self._gated(layer, x, step.gated)), following, x)
        return x

    def _norm(self, residual: torch.Tensor, x: torch.Tensor | None, norm: Any, out: torch.Tensor) -> None:
        """residual += x where given; out = norm(residual)."""
        rows, columns = residual.shape
        self._add_norm(
            rows, rows * columns, _WORTH_A_THREAD,
            residual.data_ptr(), 0 if x is None else x.data_ptr(), _address(norm), out.data_ptr(), columns, self._eps,
        )  # fmt: skip

    def _gated(self, layer: _Layer, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate_up = _apply(layer.gate_up, x)
        self._gate(
            out.size(0), 4 * out.numel(), _WORTH_A_THREAD, gate_up.data_ptr(), out.data_ptr(), out.size(1)
        )  # fmt: skip
        return out

    def _sizes(self, store: CpuKVStore) -> tuple[int, int, int, int, int]:
        layout = store.layout
        return layout.num_pages, self._heads, layout.num_kv_heads, layout.head_dim, layout.page_size

    def _write_and_rotate(
        self, layer: _Layer, index: int, x: torch.Tensor, step: _StepInputs, store: CpuKVStore
    ) -> None:
        qkv = _apply(layer.qkv, x)
        self._rotate(
            step.rows, 2 * qkv.numel(), _WORTH_A_THREAD,
            qkv.data_ptr(), self._cos.data_ptr(), self._sin.data_ptr(), self._cos.size(0), step.positions.data_ptr(),
            step.slots.data_ptr(), _address(layer.q_norm), _address(layer.k_norm), *store.addresses(index),
            step.query.data_ptr(), *self._sizes(store), layer.eps,
        )  # fmt: skip

    def _attention(self, layer: _Layer, index: int, step: _StepInputs, store: CpuKVStore) -> torch.Tensor:
        layout, plan = store.layout, step.plan
        self._attend(
            len(plan.tasks) * layout.num_kv_heads, plan.cost * self._heads * layout.head_dim, ATTENTION_WORTH_A_THREAD,
            step.query.data_ptr(), *store.addresses(index), *plan.addresses, step.attended.data_ptr(), 0, step.rows,
            *plan.sizes, QUERY_TILE, 1, *self._sizes(store), layer.scale,
        )  # fmt: skip
        return step.attended
