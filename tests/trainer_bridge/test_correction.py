"""Weights, rejection and diagnostics: published semantics, log space, masks before exp, and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollout.errors import ConfigError, InvalidRequest
from trainer_bridge.correction import correct
from trainer_bridge.correction_config import RS_OPTIONS, CorrectionConfig
from trainer_bridge.masked import masked_log_ratio, token_ratio
from trainer_bridge.offpolicy import offpolicy_metrics, probability_metrics

CONFIGS = [
    CorrectionConfig(),
    CorrectionConfig("token", 2.0),
    CorrectionConfig("token", "0.5_1.5", rollout_is_batch_normalize=True),
    CorrectionConfig("sequence", 3.0, rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2.0,0.1"),
    CorrectionConfig("sequence", "0.5_2.0", rollout_rs=",".join(RS_OPTIONS), rollout_rs_threshold="1.2"),
]


def batch(seed: int = 0, rows: int = 5, width: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random log-probs and a mask with at least one token a row."""
    draw = torch.Generator().manual_seed(seed)
    rollout = -torch.empty(rows, width).exponential_(1.0, generator=draw)
    trainer = rollout + 0.3 * torch.randn(rows, width, generator=draw)
    mask = (torch.rand(rows, width, generator=draw) < 0.7).long()
    mask[:, 0] = 1
    return trainer, rollout, mask


def poisoned(values: torch.Tensor, mask: torch.Tensor, poison: float) -> torch.Tensor:
    return torch.where(mask.bool(), values, torch.full_like(values, poison))


def one_row(log_ratios: list[float], mask: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    trainer = torch.tensor([log_ratios], dtype=torch.float32)
    return trainer, torch.zeros_like(trainer), torch.tensor([mask or [1] * len(log_ratios)])


def test_truncation_clamps_and_icepop_masks() -> None:
    row = one_row([math.log(0.25), 0.0, math.log(3.0)])
    truncated = correct(*row, CorrectionConfig("token", 2.0)).weights
    assert truncated is not None and truncated[0].tolist() == pytest.approx([0.25, 1.0, 2.0], rel=1e-6)
    masked = correct(*row, CorrectionConfig("token", "0.5_2.0")).weights
    assert masked is not None and masked[0].tolist() == [0.0, 1.0, 0.0]


def test_a_sequence_weight_is_the_product_on_every_token() -> None:
    weights = correct(
        *one_row([math.log(0.5), math.log(3.0), 9.0], [1, 1, 0]), CorrectionConfig("sequence", 2.0)
    ).weights
    assert weights is not None and weights[0].tolist() == pytest.approx([1.5, 1.5, 0.0], rel=1e-6)


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("token_k1", "2.0", [1, 1, 0]),
        ("token_k2", "0.3", [1, 1, 0]),
        ("token_k3", "0.3", [1, 1, 0]),
        ("seq_sum_k1", "2.0", [0, 0, 0]),
        ("seq_mean_k1", "2.0", [1, 1, 1]),
        ("seq_max_k2", "0.3", [0, 0, 0]),
        ("seq_sum_k3", "2.0", [1, 1, 1]),
    ],
)
def test_rejection_by_each_estimator(option: str, threshold: str, kept: list[int]) -> None:
    """Ratios 1, 1.5 and 2.25: k1 = -log, k2 = half its square, k3 = r - 1 - log r."""
    config = CorrectionConfig(rollout_rs=option, rollout_rs_threshold=threshold)
    assert correct(*one_row([0.0, math.log(1.5), math.log(2.25)]), config).mask[0].tolist() == kept


def test_an_exact_rollout_is_left_alone() -> None:
    _, rollout, mask = batch()
    for config in CONFIGS[1:]:
        done = correct(rollout, rollout, mask, config)
        assert torch.equal(done.mask, mask)
        assert done.weights is None or torch.equal(done.weights, mask.float())
        assert done.metrics["rollout_corr/kl"] == 0.0 and done.metrics["rollout_corr/chi2_seq"] == 0.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_j5_what_stands_at_mask_0_changes_no_bit(config: CorrectionConfig, poison: float) -> None:
    trainer, rollout, mask = batch()
    clean = correct(trainer, rollout, mask, config)
    done = correct(poisoned(trainer, mask, poison), poisoned(rollout, mask, -poison), mask, config)
    assert repr(done.metrics) == repr(clean.metrics) and torch.equal(done.mask, clean.mask)
    assert (done.weights is None) == (clean.weights is None)
    if done.weights is not None and clean.weights is not None:
        assert torch.equal(done.weights.view(torch.int32), clean.weights.view(torch.int32))


def test_j5_a_changed_token_at_mask_1_is_seen() -> None:
    trainer, rollout, mask = batch()
    other = trainer.clone()
    other[0, 0] += 0.25
    assert correct(other, rollout, mask, CONFIGS[1]).metrics != correct(trainer, rollout, mask, CONFIGS[1]).metrics


def loss_of(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A corrected policy-gradient loss: weights are constants, the ratio carries the gradient."""
    done = correct(trainer, rollout, mask, CorrectionConfig("token", 2.0))
    assert done.weights is not None and not done.weights.requires_grad
    ratio = token_ratio(masked_log_ratio(trainer, trainer.detach(), mask), mask)
    return -(done.weights * ratio).sum() / mask.sum()


def test_j1_overflow_under_a_mask_reaches_neither_loss_nor_gradient() -> None:
    trainer, rollout, mask = batch()
    results = []
    for poison in (0.0, 100.0, float("inf"), float("nan")):
        leaf = poisoned(trainer, mask, poison).requires_grad_()
        loss = loss_of(leaf, rollout, mask)
        loss.backward()
        assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) and bool(torch.isfinite(loss))
        results.append((loss.detach(), leaf.grad))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1])
    # The naive order, exp before the mask, is poisoned: this is what the rule keeps out.
    leaf = poisoned(trainer, mask, 100.0).requires_grad_()
    (torch.exp(leaf * 10) * mask).sum().backward()
    assert leaf.grad is not None and not bool(torch.isfinite(leaf.grad).all())


def test_the_gradient_is_the_weighted_score() -> None:
    trainer, rollout, mask = batch()
    leaf = trainer.clone().requires_grad_()
    loss_of(leaf, rollout, mask).backward()
    weights = correct(trainer, rollout, mask, CorrectionConfig("token", 2.0)).weights
    assert leaf.grad is not None and weights is not None
    assert torch.equal(leaf.grad, -(weights * (1 / mask.sum())))


def test_j3_products_stay_logarithms() -> None:
    tiny = correct(*one_row([math.log(0.7)] * 300), CorrectionConfig("sequence", 2.0))
    assert tiny.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 1.0
    assert tiny.metrics["rollout_corr/rollout_is_max"] == pytest.approx(0.7**300, rel=1e-3, abs=1e-44)
    assert tiny.metrics["rollout_corr/ppl_ratio"] == pytest.approx(1 / 0.7, rel=1e-5)
    drift = correct(*one_row([0.005] * 300), CorrectionConfig("sequence", 10.0))
    assert drift.weights is not None and float(drift.weights[0, 0]) == pytest.approx(4.4817, rel=1e-4)
    token = correct(*one_row([0.005] * 300), CorrectionConfig("token", 2.0))
    assert token.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(0.005), rel=1e-5)


def test_j6_empty_rows_dilute_nothing_unless_verls_way_is_asked_for() -> None:
    trainer = torch.full((1, 2), -2.0)
    mask = torch.ones(1, 2, dtype=torch.int64)
    alone = offpolicy_metrics(trainer, trainer, mask)
    padded = torch.cat((trainer, torch.zeros(3, 2))), torch.cat((mask, torch.zeros(3, 2, dtype=torch.int64)))
    assert offpolicy_metrics(padded[0], padded[0], padded[1]) == alone
    diluted = offpolicy_metrics(padded[0], padded[0], padded[1], drop_empty=False)
    assert alone["training_ppl"] == pytest.approx(7.389, abs=1e-3)
    assert diluted["training_ppl"] == pytest.approx(2.597, abs=1e-3)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_j6_no_metric_weight_or_mask_depends_on_empty_rows(config: CorrectionConfig) -> None:
    """Per-sample figures of weights and rejection counted an empty row as a sample of weight 0 or ratio 1."""
    trainer, rollout, mask = batch()
    # All ratios below 1: an empty row's 1 would be the largest.
    trainer = rollout - 0.5

    def padded(values: torch.Tensor, at: int) -> torch.Tensor:
        return torch.cat((values[:at], torch.zeros(3, values.shape[1], dtype=values.dtype), values[at:]))

    alone = correct(trainer, rollout, mask, config)
    for at in (0, 2, 5):
        found = correct(padded(trainer, at), padded(rollout, at), padded(mask, at), config)
        assert found.metrics == alone.metrics
        assert torch.equal(found.mask, padded(alone.mask, at))
        assert (found.weights is None) == (alone.weights is None)
        if found.weights is not None and alone.weights is not None:
            assert torch.equal(found.weights, padded(alone.weights, at))
    diluted = correct(padded(trainer, 0), padded(rollout, 0), padded(mask, 0), config, drop_empty=False)
    assert diluted.metrics != alone.metrics


def test_what_is_no_batch_and_no_switch_is_refused() -> None:
    row = torch.tensor([-1.0])
    with pytest.raises(InvalidRequest, match=r"must be \[rows, tokens\]"):
        correct(row, row, torch.tensor([1]), CorrectionConfig())
    with pytest.raises(ConfigError, match="'false' is neither true nor false"):
        CorrectionConfig("token", rollout_is_batch_normalize="false")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must satisfy 0 < lower"):
        CorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=0.0)


@pytest.mark.parametrize("side", ["trainer", "rollout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_log_prob_that_is_none_is_refused_where_it_counts(side: str, value: float) -> None:
    """It would become a weight of NaN, 0 or the cap, and train."""
    trainer, rollout, mask = batch()
    row, column = mask.nonzero()[1].tolist()
    (trainer if side == "trainer" else rollout)[row, column] = value
    with pytest.raises(InvalidRequest, match=rf"of the {side} is {value} at row {row}, token {column}.*\(1 such\)"):
        correct(trainer, rollout, mask, CONFIGS[0])
    correct(trainer, rollout, mask, CONFIGS[0], allow_nonfinite=True)
    mask[row, column] = 0
    correct(trainer, rollout, mask, CONFIGS[0])


def test_masks_and_dtypes_that_would_change_a_weight_are_refused() -> None:
    trainer, rollout, mask = batch()
    for odd in (2, -1):
        with pytest.raises(InvalidRequest, match=f"mask holds {odd}"):
            correct(trainer, rollout, mask * odd, CONFIGS[0])
    with pytest.raises(InvalidRequest, match=r"mask holds 0\.5"):
        correct(trainer, rollout, mask * 0.5, CONFIGS[0])
    for narrow in (torch.bfloat16, torch.float16, torch.int64):
        with pytest.raises(InvalidRequest, match=f"of the rollout are {narrow}"):
            correct(trainer, rollout.to(narrow), mask, CONFIGS[0])


def test_no_token_is_refused_and_no_data_is_nan() -> None:
    trainer, rollout, mask = batch()
    with pytest.raises(InvalidRequest, match="no token has mask 1"):
        correct(trainer, rollout, torch.zeros_like(mask), CONFIGS[0])
    with pytest.raises(InvalidRequest, match="one shape"):
        correct(trainer, rollout[:, :-1], mask, CONFIGS[0])
    nothing = probability_metrics(trainer, rollout, torch.zeros_like(mask))
    assert nothing.pop("training/rollout_probs_diff_valid") == 0.0
    assert all(math.isnan(value) for value in nothing.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_is": "word"},
        {"rollout_is": "token", "rollout_is_threshold": "0"},
        {"rollout_is": "token", "rollout_is_threshold": "2_1"},
        {"rollout_is": "token", "rollout_is_threshold": "a_b"},
        {"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0},
        {"rollout_rs": "token_k1"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_1"},
        {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
        {"rollout_rs": " , ", "rollout_rs_threshold": "1"},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CorrectionConfig(**fields)
