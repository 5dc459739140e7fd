"""Correct for a rollout that is not exact: importance weights and rejection, with verl's semantics and numerics.

Everything stays in log space, selects before it exponentiates, and is a constant for the backward pass: a masked
token changes neither value nor gradient, whatever stands there. For an exact rollout all weights are 1 and nothing is
rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.errors import InvalidRequest
from trainer_bridge.correction_config import CorrectionConfig
from trainer_bridge.importance import importance_weights
from trainer_bridge.masked import check_logprobs, masked_log_ratio
from trainer_bridge.offpolicy import offpolicy_metrics
from trainer_bridge.rejection import rejection_mask


@dataclass(frozen=True, slots=True)
class Correction:
    """What to train with."""

    weights: torch.Tensor | None
    """float32 [B, R] to multiply each token's loss by, 0 at mask 0; None when not asked for"""
    mask: torch.Tensor
    """[B, R] the response mask without what was rejected"""
    metrics: dict[str, float]
    """verl's ``rollout_corr/*``"""


def correct(
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    config: CorrectionConfig,
    *,
    drop_empty: bool = True,
    allow_nonfinite: bool = False,
) -> Correction:
    """Weights, mask and metrics of one padded batch.

    Args:
        trainer: float32 [B, R] nats, ``old_log_probs``. rollout: float32 [B, R] nats, ``rollout_log_probs``.
        mask: [B, R], 1 where the model sampled.
        drop_empty: leave rows without a token out of every metric; False does as verl does.
        allow_nonfinite: take NaN and infinity at mask 1 and go on with them as verl does; refused else.

    Raises:
        InvalidRequest: shapes that differ, log-probs narrower than float32 or not finite at mask 1, a mask other than
            0 and 1, or no token at all.
    """
    if mask.ndim != 2:
        raise InvalidRequest(f"mask has the shape {tuple(mask.shape)}, must be [rows, tokens]", field="mask")
    log_ratio = masked_log_ratio(trainer.detach(), rollout.detach(), mask)
    check_logprobs(trainer, "trainer", mask, allow_nonfinite=allow_nonfinite)
    check_logprobs(rollout, "rollout", mask, allow_nonfinite=allow_nonfinite)
    if not bool(mask.bool().any()):
        raise InvalidRequest("no token has mask 1: there is nothing to correct; skip the batch", field="mask")
    mask = mask.long() if mask.dtype == torch.bool else mask
    rows = mask.bool().any(dim=-1) if drop_empty else torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    metrics: dict[str, float] = {}
    weights = None
    if config.rollout_is is not None:
        found, figures = importance_weights(log_ratio[rows], mask[rows], config)
        weights = _spread(found, rows)
        metrics |= figures
    kept = mask.clone()
    if config.rollout_rs is not None:
        found, figures = rejection_mask(log_ratio[rows], mask[rows], config)
        kept = _spread(found, rows)
        metrics |= figures
    metrics |= offpolicy_metrics(trainer.detach(), rollout.detach(), mask, drop_empty=drop_empty)
    return Correction(weights, kept, {f"rollout_corr/{key}": value for key, value in metrics.items()})


def _spread(found: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Values [k, R] of the rows that were looked at, 0 in all others [B, R]."""
    whole = torch.zeros((len(rows), found.shape[1]), dtype=found.dtype, device=found.device)
    whole[rows] = found
    return whole
