"""float64 figures, and verl's metrics against its published formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.metrics import exact_mean, k3_terms, pearson, perplexity, unbiased_std, verl_metrics
from trainer_bridge.records import ScoredSample


def batch(seed: int = 3) -> list[ScoredSample]:
    draw = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate((1, 4, 9, 17)):
        rollout = -draw.exponential(1.0, length)
        trainer = rollout + draw.normal(0.0, 0.05, length)
        mask = draw.random(length) < 0.8
        mask[0] = True
        samples.append(
            sample(
                np.where(mask, rollout, np.nan).tolist(),
                np.where(mask, trainer, np.nan).tolist(),
                mask.astype(int).tolist(),
                request_id=f"r{i}",
            )
        )
    return samples


def by_formula(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """The published formulas in float64, written from their description and not from our code."""
    rows = [
        (np.float64(s.trainer_logprobs[s.mask]), np.float64(s.rollout_logprobs[s.mask]))
        for s in samples
        if s.mask.any()
    ]
    a, b = np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])
    p, q = np.exp(a), np.exp(b)
    d = a - b
    a_mean, b_mean = np.array([r[0].mean() for r in rows]), np.array([r[1].mean() for r in rows])
    sums = np.array([(r[0] - r[1]).sum() for r in rows])
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": np.abs(p - q).max(),
        "training/rollout_probs_diff_mean": np.abs(p - q).mean(),
        "training/rollout_probs_diff_std": np.abs(p - q).std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        "rollout_corr/training_ppl": np.exp(-a_mean).mean(),
        "rollout_corr/training_log_ppl": (-a_mean).mean(),
        "rollout_corr/kl": (b - a).mean(),
        "rollout_corr/k3_kl": (np.expm1(d) - d).mean(),
        "rollout_corr/rollout_ppl": np.exp(-b_mean).mean(),
        "rollout_corr/rollout_log_ppl": (-b_mean).mean(),
        "rollout_corr/log_ppl_diff": (b_mean - a_mean).mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(b_mean - a_mean).mean(),
        "rollout_corr/log_ppl_diff_max": (b_mean - a_mean).max(),
        "rollout_corr/log_ppl_diff_min": (b_mean - a_mean).min(),
        "rollout_corr/ppl_ratio": np.exp(b_mean - a_mean).mean(),
        "rollout_corr/chi2_token": np.exp(2 * np.clip(d, -20, 20)).mean() - 1,
        "rollout_corr/chi2_seq": np.exp(2 * np.clip(sums, -20, 20)).mean() - 1,
    }


def test_verl_metrics_have_verls_names_and_the_values_of_its_formulas() -> None:
    got, want = verl_metrics(batch()), by_formula(batch())
    assert got.keys() == want.keys()
    for key, value in want.items():
        # float32 arithmetic on values near 1: a few units of 2**-23 absolute.
        assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_verl_metrics_are_not_those_of_another_batch() -> None:
    got, want = verl_metrics(batch(seed=4)), by_formula(batch(seed=3))
    assert all(
        got[key] != pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in want.items() if "valid" not in key
    )


def test_verl_metrics_of_equal_bits_are_zero() -> None:
    got = verl_metrics([sample([-1.0, -2.0, -0.25])])
    zero = ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq")
    assert {key: got[f"rollout_corr/{key}"] for key in zero} == dict.fromkeys(zero, 0.0)
    assert got["training/rollout_probs_diff_max"] == 0.0 and got["rollout_corr/ppl_ratio"] == 1.0


def test_j6_verl_perplexity_is_not_diluted_by_empty_rows() -> None:
    real = sample([-2.0, -2.0])
    rows = [real, *(sample([0.0], [0.0], [0], request_id=f"e{i}") for i in range(3))]
    assert repr(verl_metrics(rows)) == repr(verl_metrics([real]))
    assert verl_metrics(rows)["rollout_corr/training_ppl"] == pytest.approx(7.389, abs=1e-3)
    diluted = [real, *(sample([0.0], [0.0], [1], request_id=f"e{i}") for i in range(3))]
    assert verl_metrics(diluted)["rollout_corr/training_ppl"] == pytest.approx(2.597, abs=1e-3)


def test_verl_metrics_without_data_are_nan_and_marked_invalid() -> None:
    got = verl_metrics([sample([np.nan], [np.nan], [0])])
    assert got.pop("training/rollout_probs_diff_valid") == 0.0
    assert got.keys() | {"training/rollout_probs_diff_valid"} == verl_metrics(batch()).keys()
    assert all(math.isnan(value) for value in got.values())


def test_one_token_has_neither_spread_nor_correlation_and_warns_of_nothing() -> None:
    got = verl_metrics([sample([-1.0], [-1.5])])
    assert math.isnan(got["training/rollout_probs_diff_std"])
    assert math.isnan(got["training/rollout_actor_probs_pearson_corr"])
    assert got["rollout_corr/kl"] == 0.5


def test_exact_mean_rounds_once() -> None:
    values = np.array([1e16, 1.0, -1e16])
    assert exact_mean(values) == 1.0 / 3.0
    assert float(values.sum()) != 1.0
    assert math.isnan(exact_mean(values[:0]))
    assert exact_mean(np.array([1.7e308, 1.7e308])) == math.inf


def test_k3_keeps_its_digits_near_zero() -> None:
    d = np.array([1e-7])
    assert k3_terms(d)[0] == pytest.approx(5e-15, rel=1e-6, abs=0.0)
    assert np.exp(d)[0] - 1 - d[0] != pytest.approx(5e-15, rel=1e-6, abs=0.0)


def test_spread_and_correlation_of_constants() -> None:
    constant, other = np.array([0.1] * 3), np.array([0.1, 0.2, 0.3])
    assert unbiased_std(constant) == 0.0 and math.isnan(unbiased_std(constant[:1]))
    assert math.isnan(pearson(constant, other)) and math.isnan(pearson(other, constant))
    assert pearson(other, -other) == pytest.approx(-1.0, abs=1e-15)


def test_perplexity_leaves_empty_rows_out() -> None:
    assert perplexity([f32([-2.0]), f32([])]) == pytest.approx(math.exp(2.0), rel=1e-15)
    assert math.isnan(perplexity([f32([])]))
