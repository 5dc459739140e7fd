"""The canary: which samples it takes, and what it does at the first unequal bit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from rollout.errors import ConfigError, ParityError
from rollout.types import Float32Array
from tests.trainer_bridge.samples import record
from trainer_bridge.canary import Canary
from trainer_bridge.correction_config import CorrectionConfig
from trainer_bridge.rollout_record import RolloutRecord

RECORDS = [record([-1.0, -2.0], request_id=f"r{i}", tokens=[i % 60, (7 * i) % 60], seed=i) for i in range(200)]


def exact(records: Sequence[RolloutRecord]) -> list[Float32Array]:
    return [r.policy_logprobs for r in records]


def one_bit_off(records: Sequence[RolloutRecord]) -> list[Float32Array]:
    return [np.nextafter(r.policy_logprobs, np.float32(0), dtype=np.float32) for r in records]


def test_the_choice_follows_the_sample_alone() -> None:
    chosen = [Canary(exact, fraction=0.25).chosen(r) for r in RECORDS]
    assert 25 <= sum(chosen) <= 80
    assert [Canary(one_bit_off, fraction=0.25).chosen(r) for r in reversed(RECORDS)] == chosen[::-1]
    wider = [Canary(exact, fraction=0.5).chosen(r) for r in RECORDS]
    assert all(w for w, c in zip(wider, chosen, strict=True) if c) and sum(wider) > sum(chosen)
    assert all(Canary(exact, fraction=1.0).chosen(r) for r in RECORDS)


def test_an_exact_rollout_passes_and_is_counted() -> None:
    canary = Canary(exact, fraction=1.0)
    assert canary.watch(RECORDS) == 400 == canary.checked_tokens and not canary.tripped
    assert canary.watch([]) == 0 and canary.correction is None


def test_the_first_unequal_bit_raises() -> None:
    with pytest.raises(ParityError, match=r"canary: UNEQUAL: 2 of 2 tokens.*1 ULP"):
        Canary(one_bit_off, fraction=1.0).watch(RECORDS[:1])


def test_correction_takes_over_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    wanted = CorrectionConfig("token", 2.0)
    canary = Canary(one_bit_off, fraction=1.0, action="correct", correction=wanted)
    assert canary.correction is None
    with caplog.at_level(logging.WARNING):
        canary.watch(RECORDS[:3])
        canary.watch(RECORDS[:3])
    assert canary.correction is wanted and canary.tripped
    assert sum("correcting from here on" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "fields",
    [{"fraction": 0.0}, {"fraction": 1.5}, {"fraction": 0.5, "action": "hope"}, {"fraction": 0.5, "action": "correct"}],
    ids=str,
)
def test_settings_are_checked(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Canary(exact, **fields)  # type: ignore[arg-type]
