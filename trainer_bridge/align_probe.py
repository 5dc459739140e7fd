"""Detect log-probs that are off by one position: compare at shifts -1, 0 and +1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_bridge.metrics import Float64Array, exact_mean
from trainer_bridge.records import ScoredSample


@dataclass(frozen=True, slots=True)
class AlignmentProbe:
    """Mean |trainer[i + shift] - rollout[i]| over tokens where both positions have mask 1, nats; NaN: no such pair."""

    minus_one: float
    zero: float
    plus_one: float

    @property
    def has_data(self) -> bool:
        """Whether neighbours exist at all: a batch of one-token samples says nothing about shifts."""
        return not np.isnan([self.minus_one, self.zero, self.plus_one]).any()

    @property
    def alarm(self) -> bool:
        """A neighbouring shift fits better than no shift. Equal values raise none: no shift can be told apart."""
        return self.has_data and min(self.minus_one, self.plus_one) < self.zero

    @property
    def best_shift(self) -> int | None:
        """Shift with the least difference, 0 preferred; None without data."""
        if not self.has_data:
            return None
        return min((0, -1, 1), key=lambda shift: {-1: self.minus_one, 0: self.zero, 1: self.plus_one}[shift])

    @property
    def verdict(self) -> str:
        """One line for a report."""
        if not self.has_data:
            return "alignment: no data (no sample has two neighbouring model tokens)"
        figures = f"mean |d| at shift -1 / 0 / +1: {self.minus_one:.3g} / {self.zero:.3g} / {self.plus_one:.3g}"
        if self.alarm:
            return f"ALARM: trainer log-probs look shifted by {self.best_shift:+d}; {figures}"
        return f"aligned; {figures}"


def probe_alignment(samples: Sequence[ScoredSample]) -> AlignmentProbe:
    """Difference of the two sides at shifts -1, 0, +1, within each sample, over mask 1 only."""
    return AlignmentProbe(
        minus_one=_mean_at_shift(samples, -1), zero=_mean_at_shift(samples, 0), plus_one=_mean_at_shift(samples, 1)
    )


def _mean_at_shift(samples: Sequence[ScoredSample], shift: int) -> float:
    parts: list[Float64Array] = []
    for sample in samples:
        length = sample.mask.size
        here = slice(max(0, -shift), length - max(0, shift))
        there = slice(max(0, shift), length - max(0, -shift))
        both = sample.mask[here] & sample.mask[there]
        rollout = sample.rollout_logprobs[here][both].astype(np.float64)
        parts.append(np.abs(sample.trainer_logprobs[there][both].astype(np.float64) - rollout))
    return exact_mean(np.concatenate(parts)) if parts else float("nan")
