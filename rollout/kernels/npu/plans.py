"""Ways to make decode and training attention agree on the NPU, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollout.errors import ConfigError, ParityError
from rollout.kernels.npu.lines import CodeLine


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One way to call attention, the same on both sides."""

    name: str
    why_exact: str
    """what makes decode, prefill and training agree"""
    cost: str
    needs_fused_infer: bool = False
    """calls the batch-invariant fused-infer operator instead of FA3"""


PLAIN = AttentionPlan(
    "plain",
    "the row sum has one order whatever the width of a tile (train-infer line only)",
    "none beyond the kernel's",
)
TILE_ALIGNED = AttentionPlan(
    "tile_aligned",
    "keys end at a multiple of 128 on both sides, so the width of a tile depends on the position alone",
    "at most 127 dummy rows and 127 masked keys a sequence; decode waits for keys and computes 128 rows a tile anyway",
)
ROW_BY_ROW = AttentionPlan(
    "row_by_row",
    "every row, of decode, prefill and training, is a decode call of flash_attn_with_kvcache",
    "keys are read once a row instead of once a tile of 128; gradients recompute through the varlen kernel",
)
FUSED_INFER = AttentionPlan(
    "fused_infer",
    "both sides call the batch-invariant fused-infer operator of the Ascend package",
    "gradients recompute through the varlen kernel",
    needs_fused_infer=True,
)
PLANS = (PLAIN, TILE_ALIGNED, ROW_BY_ROW, FUSED_INFER)


def plan_named(name: str, line: CodeLine) -> AttentionPlan:
    """The plan of a setting; "auto" is the cheapest that the line's source says is exact.

    Raises:
        ConfigError: for another name.
    """
    if name == "auto":
        return TILE_ALIGNED if line.width_dependent_sum else PLAIN
    found = next((p for p in PLANS if p.name == name), None)
    if found is None:
        raise ConfigError(
            f"attention plan {name!r} is none of auto, {', '.join(p.name for p in PLANS)}",
            field="kernels.attention_plan",
        )
    return found


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    longest: int = 1025
    """tokens of the sequence that is probed"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan showed on the device."""

    plan: str
    differing: int
    """values whose bits differ between decode, prefill and training"""
    compared: int
    seconds: float

    def __str__(self) -> str:
        verdict = "exact" if self.differing == 0 else f"{self.differing:,} of {self.compared:,} values differ"
        return f"{self.plan}: {verdict}, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Choice:
    """The first exact plan, and everything tried before it."""

    plan: AttentionPlan
    measured: tuple[Measured, ...]


def choose_plan(measure: Callable[[AttentionPlan], Measured], candidates: Sequence[AttentionPlan] = PLANS) -> Choice:
    """Measure the candidates in order and stop at the first that is exact.

    Args:
        measure: runs decode, prefill and training attention under a plan on the device and counts unequal values.

    Raises:
        ParityError: none is exact, with what each showed. A measurement that compared nothing proves nothing.
    """
    shown: list[Measured] = []
    for plan in candidates:
        shown.append(measure(plan))
        if shown[-1].compared > 0 and shown[-1].differing == 0:
            return Choice(plan, tuple(shown))
    raise ParityError(
        "no way to call attention on this device makes decode and training agree: "
        + "; ".join(str(m) for m in shown)
        + ". Use the train-infer line of flash_attn_npu or the Ascend package batch_invariant_ops (docs/npu.md)"
    )
