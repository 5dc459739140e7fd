"""Samples refuse what cannot be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.errors import InvalidRequest, ParityError
from rollout.types import LogprobMode, VersionSpan
from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.records import version_at


@pytest.mark.parametrize("name", ["rollout_logprobs", "trainer_logprobs"])
def test_c6_five_ids_and_four_logprobs_are_a_hard_error(name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"5 token_ids but 4 values in {name}") as caught:
        sample([-1.0] * 5, **{name: f32([-1.0] * 4)})
    assert caught.value.field == name


@pytest.mark.parametrize("side", ["rollout_logprobs", "trainer_logprobs"])
@pytest.mark.parametrize(("value", "word"), [(np.nan, "absent"), (-np.inf, "not a finite")])
def test_a_value_that_is_not_finite_is_refused_where_mask_is_one(side: str, value: float, word: str) -> None:
    values = f32([-1.0, -1.0, value])
    with pytest.raises(InvalidRequest, match=rf"{side} is .* \({word}.*position 2 of 3"):
        sample([-1.0] * 3, **{side: values})
    assert np.array_equal(getattr(sample([-1.0] * 3, mask=[1, 1, 0], **{side: values}), side), values, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trainer_logprobs", np.array([-1.0, -2.0])),
        ("token_ids", np.array([1, 2])),
        ("trainer_logprobs", None),
        ("mask", np.array([1, 2], dtype=np.uint8)),
        ("mask", np.array([1.0, 0.0])),
        ("trainer_logprobs", f32([-1.0, -2.0]).reshape(1, 2)),
    ],
)
def test_other_dtypes_and_shapes_are_refused_rather_than_cast(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sample(**{name: value})
    assert caught.value.field == name


def test_arrays_are_read_only_but_the_callers_stay_writable() -> None:
    mine = f32([-1.0, -2.0])
    held = sample(trainer_logprobs=mine).trainer_logprobs
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 0.0
    mine[0] = -3.0


def test_digests_of_one_side_only_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="digests of the trainer side are absent"):
        sample(rollout_digests=np.array([1, 2], dtype=np.uint64))


def test_a7_greedy_mode_and_temperature_zero_belong_together() -> None:
    assert sample(mode=LogprobMode.GREEDY_T1, temperature=0.0).temperature == 0.0
    with pytest.raises(ParityError, match="TEMPERED with temperature 0"):
        sample(temperature=0.0)
    with pytest.raises(ParityError, match=r"GREEDY_T1 with temperature 1\.0"):
        sample(mode=LogprobMode.GREEDY_T1)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_temperature_must_be_finite_and_not_negative(temperature: float) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        sample(temperature=temperature)


def test_without_a_filter_behavior_must_be_policy_bit_for_bit() -> None:
    off = f32([-1.0, np.nextafter(np.float32(-2.0), np.float32(0.0))])
    with pytest.raises(ParityError, match="position 1"):
        sample(behavior_logprobs=off)
    assert sample(behavior_logprobs=off, filtered=True).filtered
    assert sample(behavior_logprobs=off, mask=[1, 0]).mask.tolist() == [True, False]


@pytest.mark.parametrize(
    "spans",
    [
        (VersionSpan(1, 0, 3),),
        (VersionSpan(1, 0, 2), VersionSpan(2, 1, 2)),
        (VersionSpan(1, 1, 0),),
        (VersionSpan(1, 0, 1),),
    ],
)
def test_spans_out_of_order_outside_or_with_gaps_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sample(spans=spans)
    assert caught.value.field == "spans"


def test_a_token_that_does_not_enter_needs_no_span() -> None:
    spans = (VersionSpan(1, 0, 1),)
    assert sample(spans=spans, mask=[1, 0]).spans == spans
    assert version_at(spans, 0) == 1
    assert version_at(spans, 1) is None
