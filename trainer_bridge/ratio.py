"""Importance ratios trainer / rollout, in log space for as long as possible.

Three ratios that are not interchangeable: per token, per sequence (product over tokens, as a sum of logs) and geometric
mean (that sum divided by the number of tokens). A product of 300 ratios of 0.7 is 3e-47, which float32 holds as 0; its
logarithm is -107 and harmless.

Every function selects on its *input*: a masked position is replaced by log-ratio 0 before any exp, so neither value nor
gradient can see it, NaN and overflow included. Selecting on the result would give 0 * inf = NaN in the backward pass.

Shapes: B samples, R tokens of a padded row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.errors import InvalidRequest
from trainer_bridge.masked import EXPONENT_LIMIT, selected
from trainer_bridge.metrics import exact_mean
from trainer_bridge.records import ScoredSample


def masked_log_ratio(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """trainer - rollout [B, R] nats, exactly 0 at mask 0. Differentiable; the gradient at mask 0 is exactly 0."""
    if not trainer.shape == rollout.shape == mask.shape:
        raise InvalidRequest(
            f"trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask {tuple(mask.shape)} must have "
            "one shape",
            field="mask",
        )
    return selected(trainer, mask) - selected(rollout.to(trainer.dtype), mask)


def token_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(log-ratio) [B, R], 0 at mask 0. Differentiable; a real token's ratio may overflow: see ``bounded``."""
    return selected(torch.exp(selected(log_ratio, mask)), mask)


def bounded(log_ratio: torch.Tensor, limit: float = EXPONENT_LIMIT) -> torch.Tensor:
    """Clamp log-ratios to +-limit nats (verl's limit is 20); no gradient flows beyond it."""
    if not 0.0 < limit < math.inf:
        raise InvalidRequest(f"limit {limit} must be finite and > 0 nats", field="limit")
    return log_ratio.clamp(min=-limit, max=limit)


def sequence_log_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over real tokens [B] nats: the log of the sequence ratio. 0 for an empty row."""
    return _selected(log_ratio, mask).sum(dim=-1)


def geometric_log_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over real tokens [B] nats: the log of the geometric mean ratio. 0 for an empty row."""
    count = mask.bool().sum(dim=-1).clamp(min=1)
    return sequence_log_ratio(log_ratio, mask) / count


def truncated_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, *, upper: float = 2.0, lower: float = 0.0
) -> torch.Tensor:
    """Truncated importance weights clamp(ratio, lower, upper) [B, R], 0 at mask 0; a constant for the backward pass.

    Clamped as logarithms, so nothing overflows; lower = 0 means no lower limit (log 0 is never taken).
    """
    low, high = _log_limits(lower, upper)
    clamped = _selected(log_ratio.detach(), mask).clamp(min=low, max=high)
    return _selected(torch.exp(clamped), mask)


def window_weights(log_ratio: torch.Tensor, mask: torch.Tensor, *, lower: float, upper: float) -> torch.Tensor:
    """Ratio where it lies in [lower, upper], else 0 [B, R] (IcePop); 0 at mask 0; a constant for the backward pass."""
    low, high = _log_limits(lower, upper)
    real = _selected(log_ratio.detach(), mask)
    inside = mask.bool() & (real <= high)
    if low is not None:
        inside &= real >= low
    return token_ratio(real, inside)


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over real tokens of [B, R]; differentiable. NaN when there is none: no data is not 0."""
    return _selected(values, mask).sum() / mask.bool().sum()


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of per-sample values [B] over samples with a real token in ``mask`` [B, R]; empty rows do not dilute it."""
    return token_mean(values, mask.bool().any(dim=-1))


@dataclass(frozen=True, slots=True)
class RatioSummary:
    """Ratios of one batch, computed in float64. NaN: no data."""

    samples: int
    """Samples with at least one real token."""
    tokens: int
    token_mean: float
    """Mean over tokens of the token ratio; inf if it overflows float64."""
    token_log_max: float
    """nats"""
    token_log_min: float
    geometric_mean: float
    """Mean over samples of the geometric mean ratio."""
    geometric_log_max: float
    geometric_log_min: float
    sequence_log_mean: float
    """Mean over samples of the log of the sequence ratio, nats."""
    sequence_log_max: float
    sequence_log_min: float


def summarise_ratios(samples: Sequence[ScoredSample]) -> RatioSummary:
    """Token, geometric and sequence ratios apart from each other; sequence ratios stay logarithms."""
    rows = [
        s.trainer_logprobs[s.mask].astype(np.float64) - s.rollout_logprobs[s.mask].astype(np.float64)
        for s in samples
        if s.mask.any()
    ]
    tokens = np.concatenate(rows) if rows else np.empty(0, dtype=np.float64)
    sums = np.array([math.fsum(row.tolist()) for row in rows], dtype=np.float64)
    means = np.array([exact_mean(row) for row in rows], dtype=np.float64)
    nan = float("nan")
    with np.errstate(over="ignore"):
        token_mean_ratio, geometric_mean = exact_mean(np.exp(tokens)), exact_mean(np.exp(means))
    return RatioSummary(
        samples=len(rows),
        tokens=int(tokens.size),
        token_mean=token_mean_ratio,
        token_log_max=float(tokens.max(initial=-np.inf)) if rows else nan,
        token_log_min=float(tokens.min(initial=np.inf)) if rows else nan,
        geometric_mean=geometric_mean,
        geometric_log_max=float(means.max()) if rows else nan,
        geometric_log_min=float(means.min()) if rows else nan,
        sequence_log_mean=exact_mean(sums),
        sequence_log_max=float(sums.max()) if rows else nan,
        sequence_log_min=float(sums.min()) if rows else nan,
    )


def _selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if values.shape != mask.shape:
        raise InvalidRequest(
            f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have one shape", field="mask"
        )
    return selected(values, mask)


def _log_limits(lower: float, upper: float) -> tuple[float | None, float]:
    if not (0.0 <= lower <= upper and 0.0 < upper < math.inf):
        raise InvalidRequest(f"limits must satisfy 0 <= lower <= upper < inf with upper > 0, got {lower}, {upper}")
    return (math.log(lower) if lower > 0.0 else None), math.log(upper)
