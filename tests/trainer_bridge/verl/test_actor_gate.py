"""The gates of an actor: all of the first batch, then a fraction of what was sampled under the weights it holds."""

from __future__ import annotations

import logging

import pytest

from rollout.errors import ConfigError, ParityError
from tests.trainer_bridge.samples import i32, sample
from trainer_bridge.records import ScoredSample
from trainer_bridge.verl.actor_gate import ActorGate
from trainer_bridge.verl.align_state import aligned_process

GOOD = sample([-1.0, -2.0])


def bad(token: int = 10) -> ScoredSample:
    return sample([-1.0, -2.0], [-1.0, -2.5], token_ids=i32([token, 11]))


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_process(), "served_step", 5)


def opened(**options: object) -> ActorGate:
    gate = ActorGate(**options)  # type: ignore[arg-type]
    gate.check([GOOD], [None])
    return gate


def test_the_first_batch_counts_whole_whatever_is_known_of_its_weights() -> None:
    with pytest.raises(ParityError, match="step-0 gate"):
        ActorGate(fraction=1e-9).check([bad()], [None])
    assert opened().checked_tokens == 0


def test_only_rows_of_the_weights_that_the_actor_holds_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = opened()
    gate.check([GOOD, bad(), bad(), bad()], [(5, 5), (4, 4), (4, 5), None])
    assert gate.checked_tokens == 2 and gate.stale_rows == 3
    with pytest.raises(ParityError, match="canary: UNEQUAL: 1 of 4 tokens"):
        gate.check([GOOD, bad()], [(5, 5)] * 2)
    monkeypatch.setattr(aligned_process(), "served_step", None)
    gate.check([bad()], [(5, 5)])


def test_audit_warns_and_goes_on_and_off_compares_nothing(caplog: pytest.LogCaptureFixture) -> None:
    audit = opened(canary="audit")
    with caplog.at_level(logging.WARNING):
        audit.check([bad()], [(5, 5)])
        audit.check([bad()], [(5, 5)])
    assert sum("canary: UNEQUAL" in message for message in caplog.messages) == 2
    off = opened(canary="off")
    off.check([bad()], [(5, 5)])
    assert off.checked_tokens == 0


def test_a_fraction_is_chosen_by_the_sample_alone() -> None:
    gate = opened(canary="audit", fraction=0.3)
    rows = [sample([-1.0], token_ids=i32([i])) for i in range(64)]
    gate.check(rows, [(5, 5)] * 64)
    first = gate.checked_tokens
    gate.check(rows[::-1], [(5, 5)] * 64)
    assert 5 <= first <= 40 and gate.checked_tokens == 2 * first


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="ZERODRIFT_CANARY"):
        ActorGate(canary="loose")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fraction"):
        ActorGate(fraction=0.0)
