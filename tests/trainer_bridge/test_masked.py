"""Log-ratios and ratios that a loss is made of: what a mask hides reaches neither value nor gradient."""

from __future__ import annotations

import math

import pytest
import torch

from rollout.errors import InvalidRequest
from trainer_bridge.masked import clamped, masked_log_ratio, masked_mean, token_ratio

ROLLOUT = torch.tensor([[-1.0, -2.0, -0.5, -1.5]])
TRAINER = torch.tensor([[-1.25, -1.5, -0.75, -1.5]])
MASK = torch.tensor([[1, 1, 1, 0]])


def loss_and_gradient(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> tuple[float, torch.Tensor]:
    leaf = trainer.clone().requires_grad_(True)
    loss = masked_mean(token_ratio(masked_log_ratio(leaf, rollout, mask), mask), mask)
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


def test_equal_log_probs_give_ratio_one_exactly() -> None:
    assert token_ratio(masked_log_ratio(ROLLOUT, ROLLOUT, MASK), MASK).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_clamped_keeps_exp_finite() -> None:
    assert math.isinf(torch.exp(torch.tensor(100.0)).item())
    assert math.isfinite(torch.exp(clamped(torch.tensor(100.0))).item())


def test_shapes_must_agree() -> None:
    with pytest.raises(InvalidRequest, match=r"\(1, 4\).*\(1, 3\)"):
        masked_log_ratio(TRAINER, ROLLOUT, MASK[:, :3])
