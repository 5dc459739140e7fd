"""Attention of vision towers: resolved once like the kernel set, explicit > model > platform default, and never losing
a mask.

A tower's attention is dense within each image (or window) and sees nothing of the others. transformers calls it once a
segment, so an image's bits do not depend on the images beside it as long as products are invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import AttentionInterface

from rollout.errors import ConfigError, InvalidRequest, UnsupportedFeature
from rollout.kernels.base import KernelSet

VISION_INTERFACE = "zerodrift-vision"
Provider = Literal["kernel_set", "npu_fusion", "sdpa"]
PROVIDERS: Mapping[str, str] = {
    "kernel_set": "the kernel set's own varlen attention, without a causal mask",
    "npu_fusion": "torch_npu's fused npu_fusion_attention, layout TND",
    "sdpa": "torch's scaled_dot_product_attention",
}
_PLATFORM_DEFAULT: Mapping[str, str] = {"cpu": "kernel_set", "npu": "npu_fusion"}
_PATCH_EMBEDS = frozenset({"Qwen2_5_VisionPatchEmbed", "Qwen3VLVisionPatchEmbed"})


@dataclass(frozen=True, slots=True)
class VisionChoice:
    """What was resolved; everything downstream, a graph runner too, reads ``name``."""

    name: str
    source: str
    """"explicit", "model" or "platform"."""


def resolve_vision(kernels: KernelSet, explicit: str = "auto", *, model_default: str = "auto") -> VisionChoice:
    """The provider of a tower's attention.

    Raises:
        ConfigError: an unknown name. UnsupportedFeature: the fused Ascend attention on another platform.
    """
    given = ((explicit, "explicit"), (model_default, "model"), (_PLATFORM_DEFAULT[kernels.name], "platform"))
    name, source = next((n, s) for n, s in given if n not in ("", "auto"))
    if name not in PROVIDERS:
        raise ConfigError(f"vision attention {name!r} is none of auto, {', '.join(PROVIDERS)}")
    if name == "npu_fusion" and kernels.name != "npu":
        raise UnsupportedFeature(
            f"vision attention npu_fusion needs kernel set 'npu', and {kernels.name!r} was resolved; use auto"
        )
    return VisionChoice(name, source)


class VisionAttention:
    """The attention of one tower, bound to its modules; counts what it was asked, by provider."""

    def __init__(self, kernels: KernelSet, choice: VisionChoice) -> None:
        self.kernels = kernels
        self.choice = choice
        self.calls: dict[str, int] = dict.fromkeys(PROVIDERS, 0)

    @property
    def name(self) -> str:
        """The resolved provider."""
        return self.choice.name

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One segment: q, k, v [1, H, T, D], additive mask or None -> [1, T, H, D]. A mask goes to SDPA, never away."""
        provider = "sdpa" if mask is not None else self.name
        self.calls[provider] += 1
        if provider == "sdpa":
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
        run = self._kernel_set if provider == "kernel_set" else self._fused
        queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        return run(queries, keys, values, scale)[None]

    def _kernel_set(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        cu = torch.tensor([0, q.size(0)], dtype=torch.int32)
        return self.kernels.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=scale, causal=False
        )

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        length = [q.size(0)]
        out: torch.Tensor = torch.ops.npu.npu_fusion_attention(
            q, k, v, q.size(1), "TND", scale=scale, actual_seq_qlen=length, actual_seq_kvlen=length
        )[0]
        return out


def vision_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature for a tower's segment: [1, H, T, D] each -> ([1, T, H, D], None).

    Raises:
        UnsupportedFeature: dropout, causality or an unknown option. InvalidRequest: a tower that was not bound.
    """
    bound = getattr(module, "zerodrift_vision", None)
    if not isinstance(bound, VisionAttention):
        raise InvalidRequest("the vision tower was called without bind_vision")
    unknown = sorted(n for n, v in extra.items() if v is not None and v is not False and n != "position_ids")
    if dropout or is_causal or unknown:
        asked = [*(["dropout"] if dropout else []), *(["causality"] if is_causal else []), *unknown]
        raise UnsupportedFeature(f"a vision tower asked its attention for {', '.join(asked)}, which is not supported")
    return bound.attend(query, key, value, scaling, attention_mask), None


def bind_vision(tower: torch.nn.Module, kernels: KernelSet, choice: VisionChoice) -> VisionAttention:
    """Give a Hugging Face tower this attention, invariant patch embedding and the set's own norms; both sides do so."""
    AttentionInterface.register(VISION_INTERFACE, vision_interface)
    attention = VisionAttention(kernels, choice)
    config: Any = tower.config
    config._attn_implementation = VISION_INTERFACE
    found = 0
    for module in tower.modules():
        if type(module).__name__.endswith("VisionAttention"):
            module.zerodrift_vision = attention  # type: ignore[assignment]
            found += 1
        elif type(module).__name__ in _PATCH_EMBEDS:
            module.forward = _patches_as_product(module)
    if not found:
        raise UnsupportedFeature(
            f"{type(tower).__name__} has no attention that can be bound; towers: Qwen2.5-VL, Qwen3-VL"
        )
    kernels.adapt(tower)
    return attention


def _patches_as_product(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A convolution whose kernel is its stride is a product of flat patches; as one it goes through ``mm``."""

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = module.proj.weight
        patches = hidden_states.to(weight.dtype).reshape(-1, weight[0].numel())
        return functional.linear(patches, weight.flatten(1), module.proj.bias)

    return forward
