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


def check_logprobs(logprobs: torch.Tensor, side: str, mask: torch.Tensor, *, allow_nonfinite: bool = False) -> None:
    """Refuse what would become a weight of NaN, of 0 or of twice its size without a word.

    Errors: InvalidRequest for a mask other than 0 and 1, or log-probs narrower than float32 or not finite at mask 1.
    """
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)][0].item()
        raise InvalidRequest(f"mask holds {odd}; it multiplies the weights, so only 0 and 1 are defined", field="mask")
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise InvalidRequest(
            f"log-probs of the {side} are {logprobs.dtype}, must be float32: the ratio of two roundings is no weight; "
            "take them before they are cast",
            field=side,
        )
    bad = (mask.bool() & ~torch.isfinite(logprobs)).nonzero()
    if len(bad) and not allow_nonfinite:
        row, column = bad[0].tolist()
        raise InvalidRequest(
            f"the log-prob of the {side} is {logprobs[row, column].item()} at row {row}, token {column}, where mask is "
            f"1 ({len(bad)} such); set mask 0 where the model did not sample, else the side that made it is broken "
            "(allow_nonfinite=True: go on as verl does)",
            field=side,
        )


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
