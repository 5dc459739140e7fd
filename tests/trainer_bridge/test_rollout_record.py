"""From a rollout to a scored sample."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.errors import InvalidRequest, ParityError
from rollout.types import FinishReason, LogprobMode, SamplingParams
from tests.trainer_bridge.samples import f32, record
from trainer_bridge.compare import compare


def test_c4_a_sampled_eos_enters_and_a_synthetic_one_does_not() -> None:
    sampled = record([-1.0, -0.5], tokens=[11, 2], finish=FinishReason.STOP)
    assert compare([sampled.scored(f32([-1.0, -0.5]))]).tokens == 2
    synthetic = record([-1.0, float("nan")], tokens=[11, 2], mask=[1, 0])
    assert compare([synthetic.scored(f32([-1.0, -9.0]))]).tokens == 1
    with pytest.raises(InvalidRequest, match="absent"):
        record([-1.0, float("nan")], tokens=[11, 2])


def test_k4_the_finish_reason_reaches_the_trainers_record() -> None:
    assert record(finish=FinishReason.LENGTH).scored(f32([-1.0, -2.0])).finish is FinishReason.LENGTH


def test_a2_a_record_without_mode_must_be_labelled_and_a_label_is_never_overruled() -> None:
    foreign = record(sampling=None, mode=None, temperature=0.7)
    with pytest.raises(ParityError, match="mode is None"):
        foreign.scored(f32([-1.0, -2.0]))
    assert foreign.scored(f32([-1.0, -2.0]), mode=LogprobMode.TEMPERED).temperature == 0.7
    with pytest.raises(ParityError, match="mode is TEMPERED, not GREEDY_T1"):
        record().scored(f32([-1.0, -2.0]), mode=LogprobMode.GREEDY_T1)


def test_temperature_beside_sampling_must_agree() -> None:
    with pytest.raises(InvalidRequest, match="contradicts"):
        record(temperature=0.5)


def test_filters_digests_and_behavior_travel_along() -> None:
    digests = np.array([1, 2], dtype=np.uint64)
    source = record(
        sampling=SamplingParams(top_k=2), behavior_logprobs=f32([-0.5, -1.5]), row_digests=digests, replica="w1"
    )
    scored = source.scored(f32([-1.0, -2.0]), trainer_digests=digests)
    assert scored.filtered and scored.replica == "w1"
    assert compare([scored]).digests_equal == 2
    assert compare([source.scored(f32([-1.0, -2.0]))]).digests_total == 0
