"""Rejection of tokens or samples whose divergence leaves a trust region, by the estimators k1, k2 and k3.

With d = trainer - rollout: k1 = -d, k2 = d*d/2, k3 = exp(d) - 1 - d. Per token, or per sample as sum, mean or
maximum. Source of semantics and order of operations: ``compute_rollout_rejection_mask`` and ``compute_rs_metrics`` of
verl 0.9.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer_bridge.correction_config import Bounds, CorrectionConfig
from trainer_bridge.masked import clamped, extreme, masked_mean, masked_sum, selected


@dataclass(frozen=True, slots=True)
class _Statistic:
    per_token: torch.Tensor
    """[B, R]"""
    per_sample: torch.Tensor | None
    """[B]; None for a statistic of tokens"""
    kept: torch.Tensor
    """bool [B, R]"""


def rejection_mask(
    log_ratio: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Mask [B, R] without the rejected tokens, and verl's metrics without prefix.

    Args:
        log_ratio: trainer - rollout [B, R] nats. mask: [B, R] integers.
    """
    ratio = clamped(selected(log_ratio.detach(), mask))
    together = torch.ones_like(mask, dtype=ratio.dtype)
    real = mask.sum(dim=-1) > 0
    metrics: dict[str, float] = {}
    for option, bounds in config.rs_bounds().items():
        statistic = _statistic(option, ratio, mask, bounds)
        together = together * statistic.kept.to(ratio.dtype)
        metrics |= _option_metrics(option, statistic, mask, real, bounds)
    metrics["rollout_rs_masked_fraction"] = masked_mean(1 - together, mask).item()
    rejected = ~(together > 0.5) & mask.bool()
    metrics["rollout_rs_seq_masked_fraction"] = rejected.any(dim=-1).float().mean().item()
    return (mask * together).to(mask.dtype), metrics


def _estimator(name: str, ratio: torch.Tensor) -> torch.Tensor:
    if name == "k1":
        return -ratio
    if name == "k2":
        return 0.5 * ratio**2
    return torch.exp(ratio) - 1.0 - ratio


def _statistic(option: str, ratio: torch.Tensor, mask: torch.Tensor, bounds: Bounds) -> _Statistic:
    level, _, name = option.rpartition("_")
    tokens = _estimator(name, ratio)
    if level == "token":
        return _Statistic(tokens, None, _inside(tokens, bounds))
    if level == "seq_sum":
        values = masked_sum(tokens, mask, axis=-1)
    elif level == "seq_mean":
        values = masked_mean(tokens, mask, axis=-1)
    else:
        values = tokens.masked_fill(~mask.bool(), float("-inf")).max(dim=-1).values
        values = torch.where(values == float("-inf"), torch.zeros_like(values), values)
    return _Statistic(values[:, None].expand_as(mask), values, _inside(values, bounds)[:, None].expand_as(mask))


def _inside(values: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    inside = values <= bounds.upper
    return inside if bounds.lower is None else inside & (values >= bounds.lower)


def _option_metrics(
    option: str, statistic: _Statistic, mask: torch.Tensor, real: torch.Tensor, bounds: Bounds
) -> dict[str, float]:
    prefix = f"rollout_rs_{option}"
    values, lower = statistic.per_token, bounds.lower
    per_sample = statistic.per_sample
    samples = (masked_mean(values, mask, axis=-1) if per_sample is None else per_sample)[real]
    whole = per_sample is not None and samples.numel() > 0
    kept = statistic.kept.to(values.dtype)
    all_kept = (~(~statistic.kept & mask.bool())).all(dim=-1).to(values.dtype)
    present = real.float()
    figures = {
        "mean": masked_mean(values, mask).item(),
        "max": samples.max().item() if whole else extreme(values, mask, largest=True).item(),
        "min": samples.min().item() if whole else extreme(values, mask, largest=False).item(),
        "fraction_high": _fraction(values > bounds.upper, samples > bounds.upper, mask, whole),
        "fraction_low": 0.0 if lower is None else _fraction(values < lower, samples < lower, mask, whole),
        "std": _bounded_std(values, mask, bounds),
        "masked_fraction": masked_mean(1 - kept, mask).item(),
        "seq_masked_fraction": (((1.0 - all_kept) * present).sum() / present.sum()).item() if real.any() else 0.0,
    }
    figures |= _sample_figures(samples, bounds)
    return {f"{prefix}_{name}": value for name, value in figures.items()}


def _fraction(tokens: torch.Tensor, samples: torch.Tensor, mask: torch.Tensor, whole: bool) -> float:
    return (samples.float().mean() if whole else masked_mean(tokens.float(), mask)).item()


def _bounded_std(values: torch.Tensor, mask: torch.Tensor, bounds: Bounds) -> float:
    if not bool(mask.sum() > 1):
        return 0.0
    bounded = values.clamp(min=0.0 if bounds.lower is None else bounds.lower, max=bounds.upper)
    variance = masked_mean(bounded.square(), mask) - masked_mean(bounded, mask).square()
    return torch.sqrt(torch.clamp(variance, min=0.0)).item()


def _sample_figures(samples: torch.Tensor, bounds: Bounds) -> dict[str, float]:
    figures = {
        "seq_mean": samples.mean().item(),
        "seq_std": samples.std().item() if samples.numel() > 1 else 0.0,
        "seq_max": samples.max().item(),
        "seq_min": samples.min().item(),
        "seq_max_deviation": samples.abs().max().item(),
        "seq_fraction_high": (samples > bounds.upper).float().mean().item(),
    }
    if bounds.lower is not None:
        figures["seq_fraction_low"] = (samples < bounds.lower).float().mean().item()
    return figures
