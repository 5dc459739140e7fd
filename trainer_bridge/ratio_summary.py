"""Importance ratios trainer / rollout of a batch: per token, per sample and geometric mean, apart from each other (J3).

They are not interchangeable: a product of 300 ratios of 0.7 is 3e-47, which float32 holds as 0, while its logarithm is
-107 and harmless; and a drift of 0.005 a token is 1.005 as a geometric mean and 4.48 as a product. So samples' products
stay logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_bridge.metrics import exact_mean
from trainer_bridge.records import ScoredSample


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
