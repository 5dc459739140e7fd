"""Shifts by one position are detected."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer_bridge.samples import sample
from trainer_bridge.align_probe import probe_alignment

VALUES = [-0.1, -5.0, -0.7, -9.0]


def test_c7_aligned_log_probs_raise_no_alarm() -> None:
    probe = probe_alignment([sample(VALUES)])
    assert probe.zero == 0.0 and not probe.alarm and probe.best_shift == 0
    assert min(probe.minus_one, probe.plus_one) > 4.0
    assert probe.verdict.startswith("aligned")


@pytest.mark.parametrize("shift", [-1, 1])
def test_c7_a_shift_by_one_is_detected_with_its_sign(shift: int) -> None:
    trainer = np.roll(VALUES, shift).tolist()
    probe = probe_alignment([sample(VALUES, trainer), sample(VALUES, trainer, request_id="r1")])
    assert probe.alarm and probe.best_shift == shift
    assert {-1: probe.minus_one, 1: probe.plus_one}[shift] == 0.0
    assert f"shifted by {shift:+d}" in probe.verdict


def test_small_noise_is_not_a_shift() -> None:
    assert not probe_alignment([sample(VALUES, [v - 0.01 for v in VALUES])]).alarm


def test_equal_values_cannot_tell_a_shift_apart() -> None:
    assert not probe_alignment([sample([-1.0] * 4)]).alarm


def test_values_at_mask_zero_do_not_enter() -> None:
    nan = float("nan")
    masked = sample([*VALUES, nan, -3.0], [*VALUES, nan, -3.0], [1, 1, 1, 1, 0, 1])
    plain = probe_alignment([sample(VALUES)])
    probe = probe_alignment([masked])
    assert (probe.minus_one, probe.plus_one) == (plain.minus_one, plain.plus_one)


@pytest.mark.parametrize("values", [[], [-1.0]])
def test_without_neighbours_there_is_no_data(values: list[float]) -> None:
    probe = probe_alignment([sample(values)])
    assert not probe.has_data and not probe.alarm and probe.best_shift is None
    assert "no data" in probe.verdict
