"""Importance ratios: masking before exp, log space, truncation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from tests.trainer_bridge.samples import sample
from trainer_bridge.ratio import (
    bounded,
    geometric_log_ratio,
    masked_log_ratio,
    sequence_log_ratio,
    sequence_mean,
    summarise_ratios,
    token_mean,
    token_ratio,
    truncated_weights,
    window_weights,
)

ROLLOUT = torch.tensor([[-1.0, -2.0, -0.5, -1.5]])
TRAINER = torch.tensor([[-1.25, -1.5, -0.75, -1.5]])
MASK = torch.tensor([[1, 1, 1, 0]])


def loss_and_gradient(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> tuple[float, torch.Tensor]:
    leaf = trainer.clone().requires_grad_(True)
    loss = token_mean(token_ratio(masked_log_ratio(leaf, rollout, mask), mask), mask)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


@pytest.mark.parametrize("poison", [100.0, 1e30, math.inf, -math.inf, math.nan])
def test_j1_a_masked_token_reaches_neither_loss_nor_gradient(poison: float) -> None:
    poisoned = TRAINER.clone()
    poisoned[0, 3] = ROLLOUT[0, 3] + poison
    loss, gradient = loss_and_gradient(poisoned, ROLLOUT, MASK)
    want_loss, want_gradient = loss_and_gradient(TRAINER[:, :3], ROLLOUT[:, :3], MASK[:, :3])
    assert math.isfinite(loss) and bool(torch.isfinite(gradient).all())
    assert loss == want_loss
    assert torch.equal(gradient[:, :3], want_gradient) and gradient[0, 3].item() == 0.0


def test_j1_selecting_on_the_result_would_poison_the_gradient() -> None:
    leaf = TRAINER.clone()
    leaf[0, 3] = ROLLOUT[0, 3] + 100.0
    leaf.requires_grad_(True)
    ratio = torch.where(MASK.bool(), torch.exp(leaf - ROLLOUT), torch.zeros(()))
    ratio.sum().backward()
    assert leaf.grad is not None and math.isnan(leaf.grad[0, 3].item())


def test_j3_a_product_that_underflows_stays_a_logarithm() -> None:
    log_ratio = torch.full((1, 300), math.log(0.7))
    mask = torch.ones(1, 300)
    assert torch.exp(sequence_log_ratio(log_ratio, mask)).item() == 0.0
    assert sequence_log_ratio(log_ratio, mask).item() == pytest.approx(300 * math.log(0.7), rel=1e-5)
    assert torch.exp(geometric_log_ratio(log_ratio, mask)).item() == pytest.approx(0.7, rel=1e-5)
    summary = summarise_ratios([sample([0.0] * 300, [math.log(0.7)] * 300)])
    assert math.exp(summary.sequence_log_mean) == pytest.approx(3.4e-47, rel=0.02, abs=0.0)
    assert summary.token_mean == pytest.approx(0.7, rel=1e-6)
    assert summary.geometric_mean == pytest.approx(0.7, rel=1e-6)


def test_j3_small_drift_is_large_as_a_product_only() -> None:
    summary = summarise_ratios([sample([-1.0] * 300, [-0.995] * 300)])
    assert math.exp(summary.sequence_log_max) == pytest.approx(4.48, abs=0.01)
    assert summary.token_mean == pytest.approx(1.005, abs=1e-4)
    assert summary.geometric_mean == pytest.approx(1.005, abs=1e-4)


def test_j3_lower_limit_zero_takes_no_logarithm_of_zero() -> None:
    log_ratio = torch.tensor([[-200.0, 0.0, 1.0, 500.0, math.nan]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    weights = truncated_weights(log_ratio, mask, upper=2.0, lower=0.0)
    assert weights.tolist()[0] == pytest.approx([0.0, 1.0, 2.0, 2.0, 0.0], rel=1e-6)
    lifted = truncated_weights(log_ratio, mask, upper=2.0, lower=0.5)
    assert lifted.tolist()[0] == pytest.approx([0.5, 1.0, 2.0, 2.0, 0.0], rel=1e-6)
    assert not truncated_weights(log_ratio.requires_grad_(True), mask).requires_grad


def test_window_weights_drop_what_lies_outside() -> None:
    log_ratio = torch.tensor([[-3.0, -0.5, 0.5, 3.0, math.inf, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    weights = window_weights(log_ratio, mask, lower=0.5, upper=2.0)
    assert weights.tolist()[0] == pytest.approx([0.0, math.exp(-0.5), math.exp(0.5), 0.0, 0.0, 0.0], rel=1e-6)
    assert window_weights(log_ratio, mask, lower=0.0, upper=2.0)[0, 0].item() == pytest.approx(math.exp(-3.0), rel=1e-6)


@pytest.mark.parametrize(("lower", "upper"), [(-0.1, 2.0), (3.0, 2.0), (0.0, 0.0), (0.0, math.inf), (math.nan, 2.0)])
def test_limits_that_make_no_sense_are_refused(lower: float, upper: float) -> None:
    with pytest.raises(InvalidRequest, match="limits"):
        truncated_weights(ROLLOUT, MASK, upper=upper, lower=lower)


def test_equal_log_probs_give_ratio_one_exactly() -> None:
    log_ratio = masked_log_ratio(ROLLOUT, ROLLOUT, MASK)
    assert token_ratio(log_ratio, MASK).tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert truncated_weights(log_ratio, MASK).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_bounded_keeps_exp_finite() -> None:
    assert math.isinf(torch.exp(torch.tensor(100.0)).item())
    assert math.isfinite(torch.exp(bounded(torch.tensor(100.0))).item())
    with pytest.raises(InvalidRequest):
        bounded(ROLLOUT, 0.0)


def test_j6_empty_rows_do_not_dilute_a_sequence_mean() -> None:
    mask = torch.tensor([[1, 1], [0, 0], [0, 0]])
    assert sequence_mean(torch.tensor([3.0, 0.0, math.nan]), mask).item() == 3.0
    assert math.isnan(token_mean(torch.ones(1, 2), torch.zeros(1, 2)).item())


def test_shapes_must_agree() -> None:
    with pytest.raises(InvalidRequest, match=r"\(1, 4\).*\(1, 3\)"):
        masked_log_ratio(TRAINER, ROLLOUT, MASK[:, :3])
    with pytest.raises(InvalidRequest):
        sequence_log_ratio(TRAINER, MASK[:, :3])


def test_summary_without_data_is_nan() -> None:
    summary = summarise_ratios([sample([np.nan], [np.nan], [0])])
    assert summary.tokens == 0 and math.isnan(summary.token_mean) and math.isnan(summary.sequence_log_min)
