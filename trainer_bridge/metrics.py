"""Figures of the comparison in float64, and verl's names for them in verl's float32 arithmetic.

Sums go through ``math.fsum``: correctly rounded, hence the same bits in whatever order the samples come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rollout.types import Float32Array
from trainer_bridge.offpolicy import OFFPOLICY_KEYS, offpolicy_metrics, probability_metrics
from trainer_bridge.records import ScoredSample

Float64Array = npt.NDArray[np.float64]

_NAN = float("nan")


def exact_mean(values: Float64Array) -> float:
    """Mean of float64 [N], the sum correctly rounded; NaN for N = 0 or infinities of both signs, inf on overflow."""
    if values.size == 0:
        return _NAN
    try:
        return math.fsum(values.tolist()) / values.size
    except OverflowError:
        return math.inf
    except ValueError:
        return _NAN


def k3_terms(trainer_minus_rollout: Float64Array) -> Float64Array:
    """exp(d) - 1 - d per token [N], without the cancellation of the plain form; inf where exp overflows."""
    with np.errstate(over="ignore"):
        return np.expm1(trainer_minus_rollout) - trainer_minus_rollout


def unbiased_std(values: Float64Array) -> float:
    """Standard deviation of [N] with N - 1; NaN below two values."""
    if values.size < 2:
        return _NAN
    if values.min() == values.max():
        return 0.0
    deviations = values - exact_mean(values)
    return math.sqrt(math.fsum((deviations * deviations).tolist()) / (values.size - 1))


def pearson(left: Float64Array, right: Float64Array) -> float:
    """Correlation of [N] and [N]; NaN below two values or where a side has no variance (undefined, not 1)."""
    # A mean may round away from a constant, so constancy is asked for directly.
    if left.size < 2 or left.min() == left.max() or right.min() == right.max():
        return _NAN
    a = left - exact_mean(left)
    b = right - exact_mean(right)
    norm = math.sqrt(math.fsum((a * a).tolist())) * math.sqrt(math.fsum((b * b).tolist()))
    if norm == 0.0 or not math.isfinite(norm):
        return _NAN
    return max(-1.0, min(1.0, math.fsum((a * b).tolist()) / norm))


def probabilities(logprobs: Float32Array) -> Float64Array:
    """exp in float64 of float32 [N] nats."""
    with np.errstate(over="ignore"):
        return np.exp(logprobs.astype(np.float64))


def perplexity(rows: Sequence[Float32Array]) -> float:
    """Mean over non-empty rows of exp(-mean log-prob); an empty row enters nowhere. NaN without rows."""
    means = np.array([exact_mean(row.astype(np.float64)) for row in rows if row.size], dtype=np.float64)
    with np.errstate(over="ignore"):
        return exact_mean(np.exp(-means))


def verl_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """What verl 0.9.1 logs for this batch: ``training/*`` and ``rollout_corr/*``, float32, in verl's order of steps.

    Source: see ``trainer_bridge.offpolicy``. Two differences, both on purpose: samples without a token that enters are
    left out (verl averages them in as perplexity 1), and where verl raises or warns for lack of data the value is NaN.
    Sums are verl's float32 sums, so another order of samples may change the last bits.
    """
    trainer, rollout, mask = padded([sample for sample in samples if sample.mask.any()])
    offpolicy = offpolicy_metrics(trainer, rollout, mask)
    return probability_metrics(trainer, rollout, mask) | {
        f"rollout_corr/{key}": offpolicy[key] for key in OFFPOLICY_KEYS
    }


def padded(rows: Sequence[ScoredSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trainer's and rollout's log-probs and the mask as verl pads them: float32, float32, int64 [B, R], 0 at mask 0."""
    width = max((row.mask.size for row in rows), default=0)
    trainer = np.zeros((len(rows), width), dtype=np.float32)
    rollout = np.zeros((len(rows), width), dtype=np.float32)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        length = row.mask.size
        trainer[i, :length] = np.where(row.mask, row.trainer_logprobs, np.float32(0.0))
        rollout[i, :length] = np.where(row.mask, row.rollout_logprobs, np.float32(0.0))
        mask[i, :length] = row.mask
    return torch.from_numpy(trainer), torch.from_numpy(rollout), torch.from_numpy(mask)
