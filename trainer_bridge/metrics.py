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
from trainer_bridge.records import ScoredSample

Float64Array = npt.NDArray[np.float64]

_VERL_EXPONENT_LIMIT = 20.0
_VERL_EPSILON = 1e-8
_NAN = float("nan")

_TRAINING_KEYS = (
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
)
_ROLLOUT_CORR_KEYS = (
    "training_ppl",
    "training_log_ppl",
    "kl",
    "k3_kl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
)


def exact_mean(values: Float64Array) -> float:
    """Mean of float64 [N], the sum correctly rounded; NaN for N = 0, inf where the sum overflows."""
    if values.size == 0:
        return _NAN
    try:
        return math.fsum(values.tolist()) / values.size
    except OverflowError:
        return math.inf


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

    Source: ``calculate_debug_metrics`` and ``compute_offpolicy_metrics``. Two differences, both on purpose: samples
    without a token that enters are left out (verl averages them in as perplexity 1), and where verl raises or warns for
    lack of data the value is NaN. Sums are verl's float32 sums, so another order of samples may change the last bits.
    """
    rows = [sample for sample in samples if sample.mask.any()]
    if not rows:
        metrics = dict.fromkeys(_TRAINING_KEYS, _NAN)
        metrics |= {f"rollout_corr/{key}": _NAN for key in _ROLLOUT_CORR_KEYS}
        return {"training/rollout_probs_diff_valid": 0.0, **metrics}
    trainer, rollout, mask = _padded(rows)
    training = _verl_training(trainer, rollout, mask)
    offpolicy = _verl_offpolicy(trainer, rollout, mask)
    return training | {f"rollout_corr/{key}": offpolicy[key] for key in _ROLLOUT_CORR_KEYS}


def _padded(rows: Sequence[ScoredSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(row.mask.size for row in rows)
    trainer = np.zeros((len(rows), width), dtype=np.float32)
    rollout = np.zeros((len(rows), width), dtype=np.float32)
    mask = np.zeros((len(rows), width), dtype=np.bool_)
    for i, row in enumerate(rows):
        length = row.mask.size
        trainer[i, :length] = np.where(row.mask, row.trainer_logprobs, np.float32(0.0))
        rollout[i, :length] = np.where(row.mask, row.rollout_logprobs, np.float32(0.0))
        mask[i, :length] = row.mask
    return torch.from_numpy(trainer), torch.from_numpy(rollout), torch.from_numpy(mask)


def _masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    weights = mask.to(torch.float32)
    if axis is None:
        return (values * weights).sum() / (weights.sum() + _VERL_EPSILON)
    return (values * weights).sum(dim=axis) / (weights.sum(dim=axis) + _VERL_EPSILON)


def _verl_training(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    p = torch.masked_select(torch.exp(trainer), mask)
    q = torch.masked_select(torch.exp(rollout), mask)
    difference = torch.abs(p - q)
    enough = p.numel() > 1
    correlation = torch.corrcoef(torch.stack([p, q], dim=0))[0][1].item() if enough else _NAN
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std().item() if enough else _NAN,
        "training/rollout_actor_probs_pearson_corr": correlation,
    }


def _verl_offpolicy(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    log_ratio = trainer - rollout
    trainer_mean = _masked_mean(trainer, mask, axis=-1)
    rollout_mean = _masked_mean(rollout, mask, axis=-1)
    log_ppl_diff = rollout_mean - trainer_mean
    rho = torch.exp(torch.clamp(log_ratio, min=-_VERL_EXPONENT_LIMIT, max=_VERL_EXPONENT_LIMIT))
    log_ratio_sum = (log_ratio * mask).sum(dim=-1)
    bounded_sum = torch.clamp(log_ratio_sum, min=-_VERL_EXPONENT_LIMIT, max=_VERL_EXPONENT_LIMIT)
    figures = {
        "training_ppl": torch.exp(-trainer_mean).mean(),
        "training_log_ppl": (-trainer_mean).mean(),
        "kl": _masked_mean(rollout - trainer, mask),
        "k3_kl": _masked_mean(torch.exp(log_ratio) - log_ratio - 1, mask),
        "rollout_ppl": torch.exp(-rollout_mean).mean(),
        "rollout_log_ppl": (-rollout_mean).mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": torch.exp(log_ppl_diff).mean(),
        "chi2_token": _masked_mean(rho.square(), mask) - 1.0,
        "chi2_seq": torch.exp(2.0 * bounded_sum).mean() - 1.0,
    }
    return {key: value.item() for key, value in figures.items()}
