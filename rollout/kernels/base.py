"""The kernel-set contract (C3): what a model forward needs, and what a set declares about itself."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from rollout.errors import UnsupportedFeature
from rollout.kernels.edges import LengthEdge, page_edge


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel set supports. Absent means refused, never ignored."""

    dtypes: frozenset[torch.dtype]
    page_sizes: frozenset[int]
    """Tokens per KV page."""
    max_head_dim: int
    features: frozenset[str]
    """Names out of ``FEATURES``."""


FEATURES: Mapping[str, str] = {
    "causal": "causal mask aligned bottom-right",
    "gqa": "fewer KV heads than query heads",
    "paged": "paged KV cache",
    "varlen": "packed sequences by cu_seqlens",
    "backward": "gradients of the training forward",
    "sliding_window": "local attention window",
    "softcap": "tanh cap on attention scores",
    "alibi": "linear position biases",
    "mla": "multi-head latent attention",
    "fp8": "weights or KV quantised to 8 bits or fewer, by any method",
    "rope_in_kernel": "rotary embedding inside the attention kernel",
    "additive_mask": "arbitrary additive attention mask",
    "attention_sinks": "learned sink logits",
    "linear_attention": "linear or recurrent attention layers",
    "moe": "mixture-of-experts layers",
    "graph_capture": "device graph capture of a step",
}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes of a paged KV cache."""

    num_layers: int
    num_pages: int
    page_size: int
    """tokens"""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """K and V of all layers, for one page."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVStore(ABC):
    """Paged K and V of all layers, in the layout the kernel set likes best."""

    layout: KVLayout

    @abstractmethod
    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store rows: key, value [T, H_kv, D]; slots int64 [T] = page * page_size + offset."""

    @abstractmethod
    def copy_rows(self, source: int, target: int, count: int) -> None:
        """The first ``count`` rows of page ``source``, of every layer, into page ``target``, as if written there.

        What stands behind them in ``target`` is as unreadable as in a page that was just begun.
        """

    @abstractmethod
    def poison(self) -> None:
        """Fill everything with NaN: what is read without having been written then shows."""

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored rows as they were written: slots int64 [T] -> key, value [T, H_kv, D]. For diagnosis, not for speed.

        Raises:
            UnsupportedFeature: the set's layout cannot be read back.
        """
        raise UnsupportedFeature(f"{type(self).__name__} cannot read its KV back")


class BoundPaged(Protocol):
    """A rollout step's attention with lengths and tables prepared once; every layer uses it."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, H_kv, D] of this step's rows."""
        ...

    def read(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend q [T, H, D] to what is cached, this step's rows included -> [T, H, D]."""
        ...


class BoundPacked(Protocol):
    """A training pass's attention, prepared once."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [T, H, D], k and v [T, H_kv, D] of this pass's rows -> [T, H, D]; differentiable."""
        ...


@dataclass(frozen=True, slots=True)
class Product:
    """One linear product of a decoder's rollout step, and the modules that it stands for."""

    name: str
    """such as "q_proj+k_proj+v_proj" """
    modules: tuple[torch.nn.Linear, ...]
    """share their input; outputs side by side"""
    run: Callable[[torch.Tensor], torch.Tensor]
    """[T, K] -> [T, N]; call in invariant mode"""
    plan: str
    """how it is multiplied, as measured on this machine"""

    @property
    def shape(self) -> str:
        """N x K of all its modules together."""
        return f"{sum(m.out_features for m in self.modules)}x{self.modules[0].in_features}"


class Decoder(Protocol):
    """A kernel set's own forward of a rollout step: the bits of the modules in invariant mode, fewer operations."""

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
        """Final hidden states of packed rows: int64 [T] each -> [T, hidden]. Call in invariant mode, without grad.

        Args:
            output_rows: int64 [N], ascending; only these are wanted -> [N, hidden]. KV is written for all.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """lm_head in the model's dtype: [N, hidden] -> [N, >= vocab]."""
        ...

    def refresh(self) -> None:
        """Take the parameters' present values, after they changed in place."""
        ...

    def products(self) -> Sequence[Product]:
        """Its products, one of every kind and shape: the certificate compares each with its modules."""
        ...


class KernelSet(ABC):
    """One provider of every operation whose order of arithmetic matters."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    page_size: int
    """Tokens per KV page; also the block in which attention reduces keys."""
    device: torch.device = torch.device("cpu")
    """Where weights, activations and KV live. Tables and lengths of a step are host tensors on every set."""

    device_logprobs: ClassVar[bool] = False
    """C1 is the device's own log_softmax in invariant mode: the sampler takes its rows and never computes them
    again."""

    @abstractmethod
    def allocate_kv(self, layout: KVLayout) -> KVStore:
        """Reserve the whole cache up front."""

    @abstractmethod
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
        """FA3 ``flash_attn_with_kvcache`` with varlen queries and num_splits = 1; KV must already be written.

        Decode and prefill rows may come together: a set whose kernels must not see both in one call parts them here.

        Args:
            q: [T, H, D] packed query rows of B sequences.
            page_table: int32 [B, max_pages].
            cache_seqlens: int32 [B] keys of each sequence, this step's included.
            cu_seqlens_q: int32 [B + 1].

        Returns:
            [T, H, D] in q's dtype. Rows that see no key are zero.
        """

    @abstractmethod
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
        """FA3 ``flash_attn_varlen_func``: q [T, H, D]; k, v [S, H_kv, D]; differentiable. Bits as the paged call's."""

    def bind_paged(
        self,
        store: KVStore,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> BoundPaged:
        """Prepare a rollout step: each layer writes its rows to ``slots`` (int64 [T]), then attends to the pages."""
        return _PagedCalls(self, store, slots, page_table, cache_seqlens, cu_seqlens_q)

    def bind_packed(self, cu_seqlens: torch.Tensor) -> BoundPacked:
        """Prepare a training pass over packed whole sequences: ``attention_varlen``, layer by layer."""
        return _PackedCalls(self, cu_seqlens)

    def adapt(self, hf: Any) -> None:
        """Bind this set's own operators to modules of a loaded Hugging Face model; both sides load through it."""
        return None

    def decoder(self, hf: Any, context_length: int) -> Decoder | None:
        """An accelerated forward of this Hugging Face model for the rollout's side, or None to run its modules."""
        return None

    @abstractmethod
    def invariant_mode(self) -> contextlib.AbstractContextManager[None]:
        """While active, every aten operation used by a supported model is row-invariant on this set's device."""

    @abstractmethod
    def providers(self) -> Mapping[str, str]:
        """Operation name -> implementation, for the parity manifest."""

    def length_edges(self) -> tuple[LengthEdge, ...]:
        """Lengths at which this set's reductions might change their order; the certificate probes around each."""
        return (page_edge(self.page_size),)

    def measured_plan(self, hf: Any) -> Mapping[str, str]:
        """What this set chooses by measurement on this machine for this Hugging Face model, for the certificate."""
        return {}

    def open_plans(self) -> tuple[str, ...]:
        """Plans that settings left to measurement; () where there is nothing to choose."""
        return ()

    def take_plan(self, name: str) -> None:
        """Compute by one of ``open_plans`` from here on; both sides must."""
        raise UnsupportedFeature(f"kernel set {self.name!r} has no plan {name!r} to take")

    def choose_plan(self, hf: Any) -> None:
        """Take the first open plan that this device shows to be exact for this Hugging Face model.

        Raises:
            ParityError: none is, with what each showed.
        """
        return None

    def closer_views(self) -> tuple[tuple[str, KernelSet], ...]:
        """The same calls seen through results in which a difference shows sooner than in rounded outputs: name, set."""
        return ()

    def require(self, feature: str, wanted_by: str) -> None:
        """Raise UnsupportedFeature when ``feature`` is absent."""
        if feature not in self.capabilities.features:
            options = ", ".join(sorted(self.capabilities.features))
            raise UnsupportedFeature(
                f"{wanted_by} needs {feature} ({FEATURES[feature]}), which kernel set {self.name!r} does not support; "
                f"it supports: {options}"
            )


@dataclass(frozen=True, slots=True)
class _PagedCalls:
    kernels: KernelSet
    store: KVStore
    slots: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.store.write(layer, k, v, self.slots)

    def read(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        return self.kernels.attention_with_kvcache(
            q,
            self.store,
            layer,
            page_table=self.page_table,
            cache_seqlens=self.cache_seqlens,
            cu_seqlens_q=self.cu_seqlens_q,
            softmax_scale=scale,
        )


@dataclass(frozen=True, slots=True)
class _PackedCalls:
    kernels: KernelSet
    cu_seqlens: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self.kernels.attention_varlen(
            q, k, v, cu_seqlens_q=self.cu_seqlens, cu_seqlens_k=self.cu_seqlens, softmax_scale=scale
        )
