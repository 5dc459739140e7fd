"""The step-0 gate and the handshake of manifests and weight digests."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from rollout.errors import ConfigError, ParityError
from rollout.types import ServerInfo, WeightState
from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.gates import StepZeroGate, handshake
from trainer_bridge.records import ScoredSample

MANIFEST = {"dtype.model": "bfloat16", "dtype.lm_head": "bfloat16", "host.name": "a"}


def unequal() -> ScoredSample:
    values = f32([-1.0, -2.0])
    return sample(values, np.nextafter(values, f32([0.0, 0.0]), dtype=np.float32))


def info(manifest: dict[str, str], digest: str = "d0") -> ServerInfo:
    return ServerInfo("m", 64, 512, (1,), manifest, "x", WeightState(9, digest), (), False)


def test_the_gate_opens_on_equal_bits() -> None:
    gate = StepZeroGate()
    with pytest.raises(ParityError, match="before the step-0 gate"):
        gate.require_open()
    assert gate.check([sample()]).bitwise_equal and gate.is_open
    gate.require_open()


@pytest.mark.parametrize(
    "batch", [[unequal()], [sample([np.nan], [np.nan], [0])], []], ids=["unequal", "masked", "empty"]
)
def test_the_gate_stays_closed(batch: list[ScoredSample]) -> None:
    gate = StepZeroGate()
    with pytest.raises(ParityError, match="step-0 gate"):
        gate.check(batch)
    assert not gate.is_open


def test_audit_warns_and_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    audit, off = StepZeroGate("audit"), StepZeroGate("off")
    with caplog.at_level(logging.WARNING):
        assert not audit.check([unequal()]).bitwise_equal and audit.is_open
        assert "step-0 gate: UNEQUAL: 2 of 2" in caplog.text
        caplog.clear()
        assert off.is_open and off.check([unequal()]).unequal_tokens == 2 and not caplog.text
    with pytest.raises(ConfigError, match="none of strict, audit, off"):
        StepZeroGate("loose")  # type: ignore[arg-type]


def test_handshake_takes_equal_sides_whatever_their_version_numbers() -> None:
    assert handshake(info(MANIFEST), MANIFEST, WeightState(3, "d0")) == ()
    # What cannot change bits is reported, not refused.
    assert [d.key for d in handshake(info(MANIFEST), MANIFEST | {"host.name": "b"}, WeightState(3, "d0"))] == [
        "host.name"
    ]


def test_i1_unequal_head_precision_and_other_weights_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ParityError, match=r"dtype\.lm_head: 'bfloat16' \| 'float32'"):
        handshake(info(MANIFEST), MANIFEST | {"dtype.lm_head": "float32"}, WeightState(9, "d0"))
    with pytest.raises(ParityError, match=r"weights\.digest: 'd0' \| 'd1'"):
        handshake(info(MANIFEST), MANIFEST, WeightState(9, "d1"))
    with caplog.at_level(logging.WARNING):
        assert len(handshake(info(MANIFEST), MANIFEST, WeightState(9, "d1"), mode="audit")) == 1
    assert "weights.digest" in caplog.text
