"""The handshake before the first weights: strict, audit and off, aligned and not."""

from __future__ import annotations

import logging

import pytest

from rollout.errors import ParityError
from rollout.types import ServerInfo, WeightState
from trainer_bridge.verl.sync import check_manifests

MANIFEST = {"kernels.attention": "cpu", "kernels.page_size": "16", "dtype.lm_head": "bfloat16"}
INFO = ServerInfo("m", 64, 128, (1,), MANIFEST, "d", WeightState(0, "w"), (), False)


def test_equal_manifests_pass_in_every_mode() -> None:
    for mode in ("strict", "audit", "off"):
        check_manifests(INFO, MANIFEST, mode)  # type: ignore[arg-type]


def test_a_difference_is_named_refused_warned_of_or_left(caplog: pytest.LogCaptureFixture) -> None:
    other = MANIFEST | {"kernels.page_size": "128"}
    with pytest.raises(ParityError, match=r"kernels\.page_size: '16' \| '128'"):
        check_manifests(INFO, other, "strict")
    with caplog.at_level(logging.WARNING):
        check_manifests(INFO, other, "audit")
        assert "kernels.page_size" in caplog.text
        caplog.clear()
        check_manifests(INFO, other, "off")
        assert not caplog.text


def test_a_trainer_that_is_not_aligned_is_told_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """Megatron, VeOmni, or an external_lib that was forgotten."""
    with pytest.raises(ParityError, match=r"the trainer is not aligned.*external_lib=trainer_bridge\.verl\.align"):
        check_manifests(INFO, None, "strict")
    with caplog.at_level(logging.WARNING):
        check_manifests(INFO, None, "audit")
    assert "not aligned" in caplog.text
    check_manifests(INFO, None, "off")
