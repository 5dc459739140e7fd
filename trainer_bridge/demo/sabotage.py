"""Faults planted on the trainer's side on purpose: each must be caught."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout.kernels.cpu.kernel_set import CpuKernelSet
from trainer_bridge.forward import TrainingSample
from trainer_bridge.trainer import Trainer


class Sabotage(enum.Enum):
    """What to break."""

    ATTENTION = "attention"
    """the trainer attends with SDPA instead of the rollout's kernel"""
    TEMPERATURE = "temperature"
    """the trainer divides by the temperature rounded to bfloat16, as verl's non-fused path does"""
    WEIGHTS = "weights"
    """one tensor changes by one unit in the last place after the rollout got the weights"""
    ORDER = "order"
    """the trainer reduces keys in blocks of 64 instead of 128"""


SABOTAGED_TENSOR = "model.layers.3.mlp.down_proj.weight"


class SdpaKernels(CpuKernelSet):
    """The CPU set with transformers' usual training attention in place of its own."""

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
        """See ``KernelSet.attention_varlen``; equal in exact arithmetic, not in bits."""
        lengths = torch.diff(cu_seqlens_q).tolist()
        outs = []
        for one in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in one)
            out = scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def providers(self) -> Mapping[str, str]:
        """As a trainer that fell back to SDPA would truthfully say; the tokens are compared all the same."""
        return dict(super().providers()) | {"attention": "torch.scaled_dot_product_attention"}


def plant_kernels(trainer: Trainer, sabotage: Sabotage | None) -> None:
    """Swap the trainer's kernel set where the fault is in the kernels."""
    if sabotage is Sabotage.ATTENTION:
        trainer.model.kernels = SdpaKernels(trainer.model.kernels.page_size)
    if sabotage is Sabotage.ORDER:
        trainer.model.kernels = CpuKernelSet(64)


def plant_temperature(samples: Sequence[TrainingSample], sabotage: Sabotage | None) -> list[TrainingSample]:
    """Round the trainer's temperature where that is the fault."""
    if sabotage is not Sabotage.TEMPERATURE:
        return list(samples)
    rounded = [float(torch.tensor(s.temperature, dtype=torch.bfloat16)) for s in samples]
    return [TrainingSample(s.prompt_ids, s.token_ids, t) for s, t in zip(samples, rounded, strict=True)]


@torch.no_grad()
def plant_weights(trainer: Trainer, sabotage: Sabotage | None) -> None:
    """Move one tensor by one unit in the last place, on the trainer only."""
    if sabotage is not Sabotage.WEIGHTS:
        return
    parameter = dict(trainer.model.parameters())[SABOTAGED_TENSOR]
    kind = torch.int16 if parameter.dtype == torch.bfloat16 else torch.int32
    parameter.view(kind).add_(1)
