"""Token, geometric and sequence ratios stand apart (J3)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.trainer_bridge.samples import sample
from trainer_bridge.ratio_summary import summarise_ratios


def test_j3_a_product_that_underflows_stays_a_logarithm() -> None:
    summary = summarise_ratios([sample([0.0] * 300, [math.log(0.7)] * 300)])
    assert math.exp(summary.sequence_log_mean) == pytest.approx(3.4e-47, rel=0.02, abs=0.0)
    assert np.float32(math.exp(summary.sequence_log_mean)) == 0.0
    assert summary.token_mean == pytest.approx(0.7, rel=1e-6)
    assert summary.geometric_mean == pytest.approx(0.7, rel=1e-6)


def test_j3_small_drift_is_large_as_a_product_only() -> None:
    summary = summarise_ratios([sample([-1.0] * 300, [-0.995] * 300)])
    assert math.exp(summary.sequence_log_max) == pytest.approx(4.48, abs=0.01)
    assert summary.token_mean == pytest.approx(1.005, abs=1e-4)
    assert summary.geometric_mean == pytest.approx(1.005, abs=1e-4)


def test_j6_empty_samples_dilute_nothing() -> None:
    drifted, empty = sample([-1.0] * 4, [-0.5] * 4), sample([np.nan], [np.nan], [0])
    assert repr(summarise_ratios([drifted, empty, empty])) == repr(summarise_ratios([drifted]))


def test_an_exact_rollout_has_ratio_one() -> None:
    summary = summarise_ratios([sample([-1.0, -2.0])])
    assert summary.token_mean == summary.geometric_mean == 1.0 and summary.sequence_log_mean == 0.0


def test_summary_without_data_is_nan() -> None:
    summary = summarise_ratios([sample([np.nan], [np.nan], [0])])
    assert summary.tokens == 0 and math.isnan(summary.token_mean) and math.isnan(summary.sequence_log_min)
