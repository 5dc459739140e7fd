"""Figures of the comparison, and what may not influence them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ParityError
from rollout.types import LogprobMode, VersionSpan
from tests.trainer_bridge.samples import f32, i32, sample
from trainer_bridge.compare import compare
from trainer_bridge.records import Comparison, ScoredSample
from trainer_bridge.report import to_json
from trainer_bridge.ulp import UlpBin

logprob = st.floats(min_value=-60.0, max_value=-(2.0**-20), width=32)
pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8)
batches = st.lists(pairs, min_size=1, max_size=5)


def build(batch: list[list[tuple[float, float]]]) -> list[ScoredSample]:
    return [
        sample([a for a, _ in row], [b for _, b in row], request_id=f"r{i}", sample_index=i)
        for i, row in enumerate(batch)
    ]


def figures(comparison: Comparison) -> dict[str, Any]:
    return to_json(comparison)


def log_softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    scaled = [value / temperature for value in logits]
    top = max(scaled)
    norm = top + math.log(math.fsum(math.exp(value - top) for value in scaled))
    return [value - norm for value in scaled]


@given(batches)
def test_a_batch_equals_itself(batch: list[list[tuple[float, float]]]) -> None:
    result = compare(build([[(a, a) for a, _ in row] for row in batch]))
    assert result.bitwise_equal
    assert result.equal_tokens == result.tokens == sum(map(len, batch))
    assert (result.max_abs, result.k1, result.k3, result.max_ulp) == (0.0, 0.0, 0.0, 0)
    assert result.ulp_histogram == (UlpBin(0, 0, result.tokens),)
    assert result.first_mismatch is None


@given(batches, st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_no_figure(batch: list[list[tuple[float, float]]], random: Any) -> None:
    samples = build(batch)
    before = figures(compare(samples))
    random.shuffle(samples)
    assert figures(compare(samples)) == before


@given(batches, st.data())
def test_j5_nan_at_mask_zero_changes_no_figure(batch: list[list[tuple[float, float]]], data: st.DataObject) -> None:
    plain = build(batch)
    padded = []
    for one in plain:
        count = data.draw(st.integers(0, 3))
        nan = f32([np.nan] * count)
        # After the real tokens, so that coordinates stay the same; before them they would rightly move.
        padded.append(
            sample(
                one.rollout_logprobs.tolist() + [np.nan] * count,
                np.concatenate([one.trainer_logprobs, nan]).tolist(),
                [1] * one.mask.size + [0] * count,
                request_id=one.request_id,
                sample_index=one.sample_index,
            )
        )
    assert figures(compare(padded)) == figures(compare(plain))


@given(batches, st.data())
def test_a_change_of_one_ulp_is_found_at_its_place(batch: list[list[tuple[float, float]]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(batch) - 1))
    token = data.draw(st.integers(0, len(batch[row]) - 1))
    equal = [[(a, a) for a, _ in line] for line in batch]
    value = np.float32(equal[row][token][0])
    equal[row][token] = (float(value), float(np.nextafter(value, np.float32(0.0))))
    result = compare(build(equal))
    assert result.unequal_tokens == 1 and not result.bitwise_equal
    found = result.first_mismatch
    assert found is not None
    assert (found.request_id, found.sample_index, found.position) == (f"r{row}", row, token)
    assert (found.absolute_position, found.token_id, found.ulp) == (3 + token, 10 + token, 1)
    assert found.rollout_logprob == float(value) and found.rollout_bits != found.trainer_bits


def test_figures_by_hand() -> None:
    result = compare([sample([-1.0, -2.0, -0.5], [-1.5, -2.0, -0.25])])
    d = [-0.5, 0.0, 0.25]
    assert (result.tokens, result.equal_tokens, result.max_abs, result.mean_abs) == (3, 1, 0.5, 0.25)
    assert result.p50_abs == 0.25
    assert result.k1 == pytest.approx(-sum(d) / 3, rel=1e-15)
    assert result.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 3, rel=1e-14)
    diffs = [abs(math.exp(-1.5) - math.exp(-1.0)), 0.0, math.exp(-0.25) - math.exp(-0.5)]
    mean = sum(diffs) / 3
    assert result.probs_diff_max == pytest.approx(max(diffs), rel=1e-15)
    assert result.probs_diff_mean == pytest.approx(mean, rel=1e-15)
    assert result.probs_diff_std == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in diffs) / 2), rel=1e-14)
    p, q = np.exp([-1.5, -2.0, -0.25]), np.exp([-1.0, -2.0, -0.5])
    assert result.pearson == pytest.approx(np.corrcoef(p, q)[0, 1], rel=1e-14)
    assert result.rollout_ppl == pytest.approx(math.exp(3.5 / 3), rel=1e-15)


def test_zero_and_negative_zero_are_unequal_bits() -> None:
    result = compare([sample([0.0], [-0.0])])
    assert result.unequal_tokens == 1 and result.max_abs == 0.0 and result.max_ulp == 1
    assert result.first_mismatch is not None and result.first_mismatch.trainer_bits == "0x80000000"


def test_a1_values_and_the_wrong_one_is_seen() -> None:
    right = log_softmax([2.0, 1.0, 0.0], temperature=0.5)[1]
    raw = log_softmax([2.0, 1.0, 0.0])[1]
    assert right == pytest.approx(-2.14293, abs=1e-5) and raw == pytest.approx(-1.40761, abs=1e-5)
    assert math.fsum(math.exp(x) for x in log_softmax([2.0, 1.0, 0.0], 0.5)) == pytest.approx(1.0, abs=1e-15)
    assert compare([sample([right], [right], temperature=0.5)]).bitwise_equal
    wrong = compare([sample([raw / 0.5], [right], temperature=0.5)])
    assert wrong.max_abs == pytest.approx(2.81521 - 2.14293, abs=1e-5) and not wrong.bitwise_equal


def test_a2_another_mode_than_the_trainers_is_refused() -> None:
    greedy = sample(mode=LogprobMode.GREEDY_T1, temperature=0.0, request_id="g")
    with pytest.raises(ParityError, match=r"'g' sample 0 has log-probs of mode GREEDY_T1.*TEMPERED"):
        compare([sample(), greedy], mode=LogprobMode.TEMPERED)
    assert compare([sample(), sample()], mode=LogprobMode.TEMPERED).bitwise_equal
    assert compare([sample(), greedy]).bitwise_equal


def test_a7_mixed_temperatures_are_refused_when_the_trainer_used_one() -> None:
    mixed = [sample(temperature=1.0), sample(temperature=0.7, request_id="t")]
    with pytest.raises(ParityError, match=r"'t' sample 0 was sampled at temperature 0.7.*scored at 1\.0"):
        compare(mixed, temperature=1.0)
    assert compare(mixed).bitwise_equal
    assert compare([sample(temperature=float(np.float32(0.7)))], temperature=0.7).bitwise_equal


def test_a3_kept_mass_is_a_column_of_its_own_and_no_mismatch() -> None:
    policy = log_softmax([2.0, 1.0, 0.0])[1]
    behavior = log_softmax([2.0, 1.0])[1]
    filtered = sample([policy], filtered=True, behavior_logprobs=f32([behavior]))
    result = compare([filtered, sample([-1.0])])
    assert result.mean_log_kept_mass == pytest.approx(-0.09434, abs=1e-5)
    assert result.filtered_tokens == 1
    assert result.bitwise_equal and result.max_abs == 0.0
    assert math.isnan(compare([sample([-1.0])]).mean_log_kept_mass)
    # Negative control: comparing the filtered value itself does show as a mismatch.
    assert compare([sample([behavior], [policy])]).max_abs == pytest.approx(0.09434, abs=1e-5)


def test_j5_dummies_of_tool_tokens_do_not_count() -> None:
    rollout, trainer = [-1.0] * 3 + [0.0] * 5, [-1.0] * 3 + [-4.0] * 5
    assert compare([sample(rollout, trainer, [1] * 3 + [0] * 5)]).max_abs == 0.0
    assert compare([sample(rollout, trainer)]).max_abs == 4.0


def test_j6_empty_rows_do_not_dilute() -> None:
    real = sample([-1.0, -3.0], [-1.0, -3.0])
    empty = [sample([np.nan] * 2, [np.nan] * 2, [0, 0], request_id=f"e{i}") for i in range(3)]
    result = compare([real, *empty])
    assert result.trainer_ppl == result.rollout_ppl == pytest.approx(7.389, abs=1e-3)
    assert (result.samples, result.empty_samples) == (1, 3)
    alone, together = figures(compare([real])), figures(result)
    assert {k: v for k, v in together.items() if k != "empty_samples"} == {
        k: v for k, v in alone.items() if k != "empty_samples"
    }


def test_no_tokens_give_no_data_rather_than_zero() -> None:
    for batch in ([], [sample([np.nan], [np.nan], [0])], [sample([])]):
        result = compare(batch)
        assert not result.has_data and not result.bitwise_equal and result.max_ulp is None
        for name in ("max_abs", "mean_abs", "p99_abs", "k1", "k3", "probs_diff_max", "pearson", "trainer_ppl"):
            assert math.isnan(getattr(result, name)), name


def test_one_unequal_digest_breaks_equality_though_log_probs_agree() -> None:
    left, right = np.array([1, 2, 3], dtype=np.uint64), np.array([1, 2**64 - 1, 9], dtype=np.uint64)
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))
    one = sample([-1.0] * 3, mask=[1, 1, 0], rollout_digests=left, trainer_digests=right, spans=spans, replica="w0")
    result = compare([one])
    assert (result.digests_equal, result.digests_total, result.equal_tokens) == (1, 2, 2)
    assert not result.bitwise_equal and result.first_mismatch is None
    found = result.first_unequal_digest
    assert found is not None
    assert (found.position, found.absolute_position, found.weight_version, found.replica) == (1, 4, 5, "w0")
    assert (found.rollout_digest, found.trainer_digest) == ("0x0000000000000002", "0xffffffffffffffff")
    same = sample([-1.0] * 3, rollout_digests=left, trainer_digests=left)
    assert compare([same]).bitwise_equal


def test_first_mismatch_is_the_least_by_name_sample_and_position() -> None:
    late = sample([-1.0, -1.0], [-1.0, -2.0], request_id="a", sample_index=1)
    early = sample([-1.0, -1.0, -1.0], [-1.0, -1.0, -2.0], request_id="a", sample_index=0, prompt_ids=i32([1]))
    result = compare([sample([-1.0], [-3.0], request_id="b"), late, early])
    found = result.first_mismatch
    assert found is not None and (found.request_id, found.sample_index, found.position) == ("a", 0, 2)
    assert found.absolute_position == 3


def test_huge_differences_stay_finite_or_say_inf_without_warnings() -> None:
    result = compare([sample([-2000.0, -1.0], [-1.0, -2000.0])])
    assert result.k3 == math.inf and result.max_abs == 1999.0 and math.isfinite(result.mean_abs)
