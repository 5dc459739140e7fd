"""Importance weights trainer / rollout with truncation (TIS) or masking (IcePop), and verl's metrics of them.

Source of semantics and order of operations: ``compute_rollout_correction_weights`` and ``compute_is_metrics`` of verl
0.9.1. Shapes: B samples, R tokens of a padded row.
"""

from __future__ import annotations

import torch

from trainer_bridge.correction_config import Bounds, CorrectionConfig
from trainer_bridge.masked import EXPONENT_LIMIT, clamped, extreme, masked_mean, masked_sum, selected


def importance_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights [B, R], 0 at mask 0 and constant for the backward pass, and their metrics without prefix.

    Args:
        log_ratio: trainer - rollout [B, R] nats; what stands at mask 0 does not matter.
        mask: [B, R] integers, 1 where the model sampled.
    """
    bounds = config.is_bounds()
    log_ratio = selected(log_ratio.detach(), mask)
    if config.rollout_is == "sequence":
        summed = masked_sum(log_ratio, mask, axis=-1)[:, None]
        raw = torch.exp(clamped(summed)).expand_as(log_ratio) * mask
    else:
        summed = log_ratio
        raw = torch.exp(clamped(log_ratio)) * mask
    if bounds.lower is None:
        weights = raw.clamp(max=bounds.upper)
    else:
        inside = (raw >= bounds.lower) & (raw <= bounds.upper)
        weights = torch.where(inside, raw, torch.zeros_like(raw))
    metrics = _level_metrics(weights, raw, summed, mask, bounds, config.rollout_is == "sequence")
    metrics |= _spread(weights, mask, bounds) | _by_sequence(weights, raw, mask, bounds)
    if bounds.lower is not None:
        outside = (raw < bounds.lower) | (raw > bounds.upper)
        metrics["rollout_is_oob_ratio"] = masked_mean(outside.float(), mask).item()
    if config.rollout_is_batch_normalize:
        weights, metrics["rollout_is_batch_norm_factor"] = _normalised(weights, mask, config.rollout_is == "sequence")
    return weights, metrics


def _least(bounds: Bounds) -> float:
    return 1.0 / bounds.upper if bounds.lower is None else bounds.lower


def _level_metrics(
    weights: torch.Tensor, raw: torch.Tensor, summed: torch.Tensor, mask: torch.Tensor, bounds: Bounds, sequence: bool
) -> dict[str, float]:
    mean = masked_mean(weights, mask).item()
    if sequence:
        high, low = torch.log(torch.tensor(bounds.upper)), torch.log(torch.tensor(_least(bounds)))
        return {
            "rollout_is_max": torch.exp(torch.clamp(summed.max(), max=EXPONENT_LIMIT)).item(),
            "rollout_is_min": torch.exp(summed.min()).item(),
            "rollout_is_mean": mean,
            "rollout_is_ratio_fraction_high": (summed > high).float().mean().item(),
            "rollout_is_ratio_fraction_low": (summed < low).float().mean().item(),
        }
    return {
        "rollout_is_mean": mean,
        "rollout_is_ratio_fraction_high": masked_mean((raw > bounds.upper).float(), mask).item(),
        "rollout_is_ratio_fraction_low": masked_mean((raw < _least(bounds)).float(), mask).item(),
        "rollout_is_max": extreme(weights, mask, largest=True).item(),
        "rollout_is_min": extreme(weights, mask, largest=False).item(),
    }


def _spread(weights: torch.Tensor, mask: torch.Tensor, bounds: Bounds) -> dict[str, float]:
    bounded = weights.clamp(min=0.0, max=bounds.upper)
    mean = masked_mean(bounded, mask)
    variance = masked_mean(bounded.square(), mask) - mean.square()
    several = bool(mask.sum() > 1)
    normalised = bounded / (mean + 1e-8)
    return {
        "rollout_is_std": torch.sqrt(torch.clamp(variance, min=0.0)).item() if several else 0.0,
        "rollout_is_eff_sample_size": _inverse(masked_mean(normalised.square(), mask).item()),
    }


def _inverse(value: float) -> float:
    # verl divides by zero here when every weight is masked away; no sample is effective then.
    return 1.0 / value if value else 0.0


def _by_sequence(weights: torch.Tensor, raw: torch.Tensor, mask: torch.Tensor, bounds: Bounds) -> dict[str, float]:
    means = masked_mean(weights, mask, axis=-1)
    raw_means = masked_mean(raw, mask, axis=-1)
    return {
        "rollout_is_seq_mean": means.mean().item(),
        "rollout_is_seq_std": means.std().item() if means.numel() > 1 else 0.0,
        "rollout_is_seq_max": means.max().item(),
        "rollout_is_seq_min": means.min().item(),
        "rollout_is_seq_max_deviation": (means - 1.0).abs().max().item(),
        "rollout_is_seq_fraction_high": (raw_means > bounds.upper).float().mean().item(),
        "rollout_is_seq_fraction_low": (raw_means < _least(bounds)).float().mean().item(),
    }


def _normalised(weights: torch.Tensor, mask: torch.Tensor, sequence: bool) -> tuple[torch.Tensor, float]:
    if sequence:
        each = masked_mean(weights, mask, axis=-1)
        real = (mask.sum(dim=-1) > 0).to(weights.dtype)
        mean = (each * real).sum() / real.sum().clamp_min(1e-8)
    else:
        mean = masked_mean(weights, mask)
    if not bool(mean > 1e-8):
        return weights, 1.0
    return weights / mean, mean.item()
