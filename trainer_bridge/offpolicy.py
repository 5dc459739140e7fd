"""verl's float32 figures of a padded batch: ``training/rollout_probs_diff_*`` and the ``rollout_corr/`` diagnostics.

Source: ``calculate_debug_metrics`` and ``compute_offpolicy_metrics`` of verl 0.9.1, in their order of operations.
Rows without a token: verl counts them as perplexity 1, which dilutes every per-sample mean (J6). ``drop_empty``
leaves them out.
"""

from __future__ import annotations

import torch

from trainer_bridge.masked import clamped, masked_mean, masked_sum, selected

NAN = float("nan")


def probability_metrics(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Differences of probabilities over mask 1, under verl's names; NaN where verl has no number.

    Args:
        trainer, rollout: float32 [B, R] nats. mask: [B, R].
    """
    enters = mask.bool()
    p, q = torch.masked_select(torch.exp(trainer), enters), torch.masked_select(torch.exp(rollout), enters)
    difference = torch.abs(p - q)
    some, several = p.numel() > 0, p.numel() > 1
    correlation = torch.corrcoef(torch.stack([p, q], dim=0))[0][1].item() if several else NAN
    return {
        "training/rollout_probs_diff_valid": 1.0 if some else 0.0,
        "training/rollout_probs_diff_max": difference.max().item() if some else NAN,
        "training/rollout_probs_diff_mean": difference.mean().item() if some else NAN,
        "training/rollout_probs_diff_std": difference.std().item() if several else NAN,
        "training/rollout_actor_probs_pearson_corr": correlation,
    }


def offpolicy_metrics(
    trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, *, drop_empty: bool = True
) -> dict[str, float]:
    """KL estimators, perplexities and chi-square of a batch, verl's names without prefix; NaN without data.

    Args:
        trainer, rollout: float32 [B, R] nats. mask: [B, R] integers.
        drop_empty: leave out rows without a token; False does as verl does.
    """
    if drop_empty:
        real = mask.bool().any(dim=-1)
        trainer, rollout, mask = trainer[real], rollout[real], mask[real]
    trainer, rollout = selected(trainer, mask), selected(rollout, mask)
    log_ratio = trainer - rollout
    trainer_mean, rollout_mean = masked_mean(trainer, mask, axis=-1), masked_mean(rollout, mask, axis=-1)
    difference = rollout_mean - trainer_mean
    summed = clamped(masked_sum(log_ratio, mask, axis=-1))
    if not bool(mask.bool().any()):
        return dict.fromkeys(OFFPOLICY_KEYS, NAN)
    figures = {
        "training_ppl": torch.exp(-trainer_mean).mean(),
        "training_log_ppl": (-trainer_mean).mean(),
        "kl": masked_mean(rollout - trainer, mask),
        "k3_kl": masked_mean(torch.exp(log_ratio) - log_ratio - 1, mask),
        "rollout_ppl": torch.exp(-rollout_mean).mean(),
        "rollout_log_ppl": (-rollout_mean).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": torch.exp(difference).mean(),
        "chi2_token": masked_mean(torch.exp(clamped(log_ratio)).square(), mask) - 1.0,
        "chi2_seq": torch.exp(2.0 * summed).mean() - 1.0,
    }
    return {key: value.item() for key, value in figures.items()}


OFFPOLICY_KEYS = (
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
