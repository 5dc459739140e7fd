"""One operation as the float64 reference sees it: what it read, and what it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rollout.oracle import Sizes

ROUNDED: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    torch.bfloat16: (torch.float8_e4m3fn,),
    torch.float16: (torch.bfloat16, torch.float8_e4m3fn),
}
"""Types that a value of this type may have gone through."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an operation read. S rows, equal on both sides."""

    tap: str
    layer: int | None
    values: Mapping[str, torch.Tensor]
    """tap -> [S, ...]"""
    rows: torch.Tensor
    """int64 rows to compute"""
    token_ids: tuple[int, ...]
    sizes: Sizes
    dtype: torch.dtype
    weight: Callable[[str], torch.Tensor | None]
    """parameter name -> values"""
    page: int = 0
    """tokens of a KV page; 0: unknown"""

    @property
    def operation(self) -> str:
        """Tap without its layer."""
        return self.tap.split(".", 2)[2] if self.layer is not None else self.tap

    def value(self, tap: str) -> torch.Tensor:
        """float64 [S, ...] of a tap of this layer, or of the model."""
        name = tap if tap in self.values else f"layers.{self.layer}.{tap}"
        return self.values[name].double()

    def parameter(self, module: str, leaf: str = "weight") -> torch.Tensor | None:
        """float64 parameter of a module of this layer, or of the model."""
        part = "mlp." if module in ("gate_proj", "up_proj", "down_proj") else ""
        part = "self_attn." if module in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm") else part
        prefix = f"model.layers.{self.layer}." if self.layer is not None else "model."
        found = self.weight(f"{prefix}{part}{module}.{leaf}")
        return None if found is None else found.double()


@dataclass(frozen=True, slots=True)
class Variant:
    """The operation, or the operation with a fault. ``words`` is empty for the right one."""

    words: str
    compute: Callable[[Inputs], torch.Tensor]
    """float64 [rows, ...]"""


def needs(tap: str, layer: int | None, layers: int) -> tuple[str, ...]:
    """Taps an operation reads."""
    if layer is None:
        return {"norm": (f"layers.{layers - 1}.output",), "logits": ("norm",)}.get(tap, ())
    before = "embed" if layer == 0 else f"layers.{layer - 1}.output"
    own = f"layers.{layer}."
    table: dict[str, tuple[str, ...]] = {
        "input_layernorm": (before,),
        "q_proj": (f"{own}input_layernorm",),
        "k_proj": (f"{own}input_layernorm",),
        "v_proj": (f"{own}input_layernorm",),
        "q_norm": (f"{own}q_proj",),
        "k_norm": (f"{own}k_proj",),
        "queries": (f"{own}q_norm", f"{own}q_proj", "rope.cos", "rope.sin"),
        "keys": (f"{own}k_norm", f"{own}k_proj", "rope.cos", "rope.sin"),
        "values": (f"{own}v_proj",),
        "attention": (f"{own}queries", f"{own}keys", f"{own}values"),
        "o_proj": (f"{own}attention",),
        "attn_residual": (before, f"{own}o_proj"),
        "post_attention_layernorm": (f"{own}attn_residual",),
        "gate_proj": (f"{own}post_attention_layernorm",),
        "up_proj": (f"{own}post_attention_layernorm",),
        "act": (f"{own}gate_proj", f"{own}up_proj"),
        "gated": (f"{own}act", f"{own}up_proj"),
        "down_proj": (f"{own}gated",),
        "output": (f"{own}attn_residual", f"{own}down_proj", before),
    }
    return table.get(tap.split(".", 2)[2], ())
