"""The determinism environment: set before anything starts, or refused (L3)."""

from __future__ import annotations

import pytest

from rollout.errors import ConfigError
from rollout.kernels.npu import environment
from rollout.manifest import ENVIRONMENT, HOST_ENVIRONMENT


def test_unset_variables_are_set_and_reported() -> None:
    environ: dict[str, str] = {"HCCL_DETERMINISTIC": "strict", "OTHER": "x"}
    names = environment.apply(environ, device_started=False, communicators=False)
    assert "HCCL_DETERMINISTIC" not in names and "LCCL_DETERMINISTIC" in names
    assert environ == environment.required() | {"OTHER": "x"}
    assert environment.apply(environ, device_started=True, communicators=True) == ()


@pytest.mark.parametrize(
    ("device", "group", "words"), [(True, False, "NPU is initialised"), (False, True, "process group")]
)
def test_too_late_is_refused_with_the_way_out(device: bool, group: bool, words: str) -> None:
    environ = environment.required()
    del environ["LCCL_DETERMINISTIC"]
    with pytest.raises(ConfigError, match=f"{words}.*start the process with LCCL_DETERMINISTIC=1"):
        environment.apply(environ, device_started=device, communicators=group)
    assert "LCCL_DETERMINISTIC" not in environ


@pytest.mark.parametrize("value", ["true", "false", ""])
def test_another_value_is_refused_even_early(value: str) -> None:
    """Also ``true``: on A2 only ``strict`` keeps the order of ranks."""
    with pytest.raises(ConfigError, match=f"HCCL_DETERMINISTIC={value} must be strict"):
        environment.apply({"HCCL_DETERMINISTIC": value}, device_started=False, communicators=False)


def test_the_manifest_records_the_table() -> None:
    names = {v.name for v in environment.TABLE}
    assert names == (set(ENVIRONMENT) | set(HOST_ENVIRONMENT)) & names
    assert "ASCEND_RT_VISIBLE_DEVICES" in HOST_ENVIRONMENT and "HCCL_DETERMINISTIC" in ENVIRONMENT
    assert environment.recorded({"HCCL_DETERMINISTIC": "strict"})["HCCL_DETERMINISTIC"] == "strict"
    assert all(v.value is None or v.changes_bits for v in environment.TABLE)
