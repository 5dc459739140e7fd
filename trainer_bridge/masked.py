"""Masked sums and means in verl's order of operations, so that float32 results are verl's to the last bit.

Source: ``masked_sum`` and ``masked_mean`` of ``verl.utils.torch_functional`` 0.9.1: select, multiply by the mask,
sum, divide by count + 1e-8. Selection comes first, so NaN and infinity at mask 0 never enter.
"""

from __future__ import annotations

import torch

from rollout.errors import InvalidRequest

EPSILON = 1e-8
EXPONENT_LIMIT = 20.0
"""nats; verl's SAFETY_BOUND"""


def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values [B, R] at mask 1, exactly 0 elsewhere; no gradient flows to mask 0."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_log_ratio(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """trainer - rollout [B, R] nats, exactly 0 at mask 0. Differentiable; the gradient at mask 0 is exactly 0.

    Errors: InvalidRequest for shapes that differ.
    """
    if not trainer.shape == rollout.shape == mask.shape:
        raise InvalidRequest(
            f"trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask {tuple(mask.shape)} must have "
            "one shape",
            field="mask",
        )
    return selected(trainer, mask) - selected(rollout.to(trainer.dtype), mask)


def token_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(log-ratio) [B, R], 0 at mask 0. Differentiable; a real token's ratio may overflow: see ``clamped``.

    Selects before the exponential as well: selecting its result alone would give 0 * inf = NaN in the backward pass.
    """
    return selected(torch.exp(selected(log_ratio, mask)), mask)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Sum over mask 1: of all, or along ``axis``."""
    kept = selected(values, mask) * mask
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Mean over mask 1; 0 where there is nothing, as verl has it."""
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + EPSILON)


def clamped(values: torch.Tensor) -> torch.Tensor:
    """Values within +-20 nats, so that exp stays finite."""
    return values.clamp(min=-EXPONENT_LIMIT, max=EXPONENT_LIMIT)


def extreme(values: torch.Tensor, mask: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """Largest or smallest value at mask 1."""
    if largest:
        return values.masked_fill(~mask.bool(), float("-inf")).max()
    return values.masked_fill(~mask.bool(), float("inf")).min()
