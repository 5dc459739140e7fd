"""How a step's attention reaches the kernel set: one ``AttentionInterface`` function, two kinds of step.

The rollout passes a ``PagedStep`` (KV pages, page table), the trainer a ``PackedStep`` (cu_seqlens), as the keyword
``attention_step`` of the model call. The same Hugging Face modules run on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.kernels.base import BoundPacked, BoundPaged, KernelSet, KVStore


class AttentionStep(Protocol):
    """Metadata of one forward pass."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [T, H, D], k and v [T, H_kv, D] of this pass's rows -> [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A rollout step over B sequences: rows are written to their pages, then attend to everything before them."""

    kernels: KernelSet
    store: KVStore
    slots: torch.Tensor
    """int64 [T] page * page_size + offset of each row"""
    page_table: torch.Tensor
    """int32 [B, max_pages]"""
    cache_seqlens: torch.Tensor
    """int32 [B] keys per sequence, this step's rows included"""
    cu_seqlens_q: torch.Tensor
    """int32 [B + 1]"""

    bound: BoundPaged = field(init=False, repr=False)

    def __post_init__(self) -> None:
        bound = self.kernels.bind_paged(
            self.store, self.slots, self.page_table, self.cache_seqlens, self.cu_seqlens_q
        )  # fmt: skip
        object.__setattr__(self, "bound", bound)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Write k and v to their slots, then attend to all cached keys: [T, H, D] in q's dtype."""
        self.bound.write(layer, k, v)
        return self.read(layer, q, scale)

    def read(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend to what is cached, this pass's rows included."""
        return self.bound.read(layer, q, scale)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A training or scoring pass over packed whole sequences."""

    kernels: KernelSet
    cu_seqlens: torch.Tensor
    """int32 [B + 1]"""

    bound: BoundPacked = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", self.kernels.bind_packed(self.cu_seqlens))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend within each packed sequence, differentiable: [T, H, D] in q's dtype."""
        return self.bound.attend(layer, q, k, v, scale)


_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "logits_to_keep"}
)
"""Keywords that models pass along and that do not concern attention here."""


def interface_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    attention_step: AttentionStep | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, H, T, D], key and value [1, H_kv, T, D] -> ([1, T, H, D], None).

    Raises:
        UnsupportedFeature: for a mask, window, softcap, sink or dropout: none of them is ever dropped in silence.
    """
    if attention_step is None:
        raise InvalidRequest("the shared model was called without attention_step; use SharedModel.hidden_states")
    if query.size(0) != 1:
        raise InvalidRequest(f"attention takes packed rows in a batch of 1, got a batch of {query.size(0)}")
    if attention_mask is not None:
        raise UnsupportedFeature("an additive attention mask reached the kernel set; pack sequences instead of padding")
    if dropout:
        raise UnsupportedFeature(
            f"attention dropout {dropout} is not reproducible between rollout and trainer; set it to 0"
        )
    unknown = sorted(n for n, v in extra.items() if n not in _HARMLESS and v is not None and v is not False)
    if unknown:
        raise UnsupportedFeature(f"attention was asked for {', '.join(unknown)}, which the kernel sets do not support")
    out = attention_step.attend(
        int(getattr(module, "layer_idx")),  # noqa: B009
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return out[None], None


def interface_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """transformers' mask signature: packed rows need no mask, and one that hides a token is refused, never dropped.

    Raises:
        UnsupportedFeature: the caller passed a padding mask with a zero in it.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedFeature("an attention mask that hides tokens reached the shared model; pack, do not pad")


INTERFACE_NAME = "zerodrift"


def register_interface() -> str:
    """Make the attention known to transformers; returns the name for ``attn_implementation``. Idempotent."""
    AttentionInterface.register(INTERFACE_NAME, interface_attention)
    AttentionMaskInterface.register(INTERFACE_NAME, interface_mask)
    return INTERFACE_NAME
