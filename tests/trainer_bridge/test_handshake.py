"""Differences of two parity manifests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rollout.errors import ConfigError, ParityError
from rollout.types import WeightState
from trainer_bridge.handshake import ManifestDifference, can_change_bits, diff_manifests, require_equal, with_weights

BASE = {"kernels.attention": "cpu-paged", "lm_head.dtype": "float32", "host.name": "a", "dtype.weights": "bfloat16"}


def test_equal_manifests_differ_in_nothing() -> None:
    assert diff_manifests(BASE, dict(reversed(BASE.items()))) == ()
    assert require_equal(BASE, dict(BASE), mode="strict") == ()


def test_i1_unequal_head_precision_is_refused() -> None:
    with pytest.raises(ParityError, match=r"lm_head\.dtype: 'float32' \| 'bfloat16'"):
        require_equal(BASE, BASE | {"lm_head.dtype": "bfloat16"}, mode="strict")


def test_every_serious_difference_is_listed_and_harmless_ones_are_returned() -> None:
    other = {k: v for k, v in BASE.items() if k != "kernels.attention"} | {"dtype.weights": "float32", "host.name": "b"}
    with pytest.raises(ParityError, match="2 manifest key") as caught:
        require_equal(BASE, other, mode="strict")
    assert "kernels.attention: 'cpu-paged' | (absent)" in str(caught.value)
    assert "host.name" not in str(caught.value)
    harmless = require_equal(BASE, BASE | {"host.name": "b"}, mode="strict")
    assert harmless == (ManifestDifference("host.name", "a", "b", can_change_bits=False),)


def test_absent_is_not_the_empty_string() -> None:
    assert diff_manifests({"model.x": ""}, {}) == (ManifestDifference("model.x", "", None, can_change_bits=True),)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("kernels.linear", True),
        ("dtype.activations", True),
        ("library.torch", True),
        ("library.ray", False),
        ("lm_head.dtype", True),
        ("logprob.mode", True),
        ("weights.digest", True),
        ("model.config_digest", True),
        ("device.name", False),
        ("device.isa", True),
        ("host.name", False),
        ("something.nobody.knows", True),
    ],
)
def test_which_keys_can_change_bits(key: str, expected: bool) -> None:
    assert can_change_bits(key) is expected


def test_stale_weights_are_a_difference() -> None:
    old, new = WeightState(1, "aa"), WeightState(2, "bb")
    with pytest.raises(ParityError, match=r"weights\.digest: 'aa' \| 'bb'\n  weights\.version: '1' \| '2'"):
        require_equal(with_weights(BASE, old), with_weights(BASE, new), mode="strict")
    assert require_equal(with_weights(BASE, new), with_weights(BASE, new), mode="strict") == ()


def test_audit_warns_and_goes_on_and_off_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    other = BASE | {"lm_head.dtype": "bfloat16", "host.name": "b"}
    with caplog.at_level(logging.WARNING):
        assert [d.key for d in require_equal(BASE, other, mode="off")] == ["lm_head.dtype", "host.name"]
        assert not caplog.records
        assert len(require_equal(BASE, other, mode="audit")) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "parity manifest differs (rollout | trainer): lm_head.dtype: 'float32' | 'bfloat16'"
    ]


def test_nothing_to_check_is_not_agreement() -> None:
    with pytest.raises(ParityError, match="empty"):
        require_equal({}, {}, mode="strict")


def test_an_unknown_mode_is_refused() -> None:
    mode: Any = "lenient"
    with pytest.raises(ConfigError, match="'lenient' is none of strict, audit, off"):
        require_equal(BASE, BASE, mode=mode)
