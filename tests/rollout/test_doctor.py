"""The doctor on hosts that are not there: what it finds, what it asks for, and in which order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout import cli
from rollout.doctor import ASK_TORCH_NPU, Finding, Host, examine
from rollout.kernels.npu import environment

WHOLE = {
    "torch": "2.13.0",
    "transformers": "5.10.4",
    "torch-npu": "2.13.0",
    "flash_attn_npu": "0.4.2.post1",
    "ray": "2.60",
}


@pytest.fixture
def npu_host(tmp_path: Path) -> Host:
    """Everything but the optional package."""
    driver = tmp_path / "version.info"
    driver.write_text("Version=25.2.0\nOther=1\n")
    environ = {"ASCEND_HOME_PATH": "/opt/cann", "ASCEND_OPP_PATH": "/opt/cann/opp"} | environment.required()
    return Host(
        nodes=lambda: ("davinci0",), version=WHOLE.get, ask=lambda code: "2.13.0|1|Ascend910B3", environ=environ,
        driver_file=driver, machine="aarch64",
    )  # fmt: skip


def by_part(host: Host) -> dict[str, Finding]:
    return {f.part: f for f in examine(host)}


def changed(host: Host, **versions: str | None) -> Host:
    names = {name.replace("_npu", "-npu") if name == "torch_npu" else name: v for name, v in versions.items()}
    return dataclasses.replace(host, version=(WHOLE | names).get)


def test_a_whole_npu_host(npu_host: Host) -> None:
    found = by_part(npu_host)
    assert [p for p, f in found.items() if f.state == "broken"] == []
    assert found["kernel set"].found == "npu" and found["driver"].found == "25.2.0"
    assert "line later" in found["flash_attn_npu"].found and found["batch_invariant_ops"].state == "absent"
    assert "fixed-shape" in found["batch_invariant_ops"].next_step


def test_a_cpu_host_needs_nothing() -> None:
    host = Host(nodes=lambda: (), version={"torch": "2.13.0", "ray": "2"}.get, environ={}, driver_file=Path("/none"))
    found = by_part(host)
    assert {f.state for f in found.values()} <= {"ok", "absent", "not needed"} and found["kernel set"].found == "cpu"


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        ({"torch_npu": None}, "torch_npu", "pip install 'torch-npu==2.13.*'"),
        ({"torch_npu": "2.12.0"}, "torch_npu", "pip install 'torch-npu==2.13.*'"),
        ({"flash_attn_npu": None}, "flash_attn_npu", "CANN >= 8.5"),
        ({"flash_attn_npu": "0.1.1"}, "flash_attn_npu", "older than any line"),
        ({"ray": None}, "ray", "make setup"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_missing_comes_with_the_next_step(npu_host: Host, change: Any, part: str, words: str) -> None:
    finding = by_part(changed(npu_host, **change))[part]
    assert finding.state == "broken" and words in finding.next_step


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("failed|ImportError: libhccl.so", "does not import: ImportError: libhccl.so"),
        ("2.13.0|0|-", "no device visible"),
    ],
)
def test_torch_npu_that_is_there_and_does_not_work(npu_host: Host, answer: str, words: str) -> None:
    finding = by_part(dataclasses.replace(npu_host, ask=lambda code: answer))["torch_npu"]
    assert finding.state == "broken" and words in finding.found and finding.next_step


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ("ascend", "ok", "2.0.0, Ascend"),
        ("cuda", "broken", "CUDA package of the same import name"),
        ("ascend|npu_mm_batch_invariant", "broken", "lacks npu_mm_batch_invariant"),
        ("failed|OSError: libcust_opapi.so", "broken", "libcust_opapi.so"),
    ],
)
def test_batch_invariant_ops(npu_host: Host, answer: str, state: str, words: str) -> None:
    host = dataclasses.replace(
        npu_host,
        version=(WHOLE | {"batch_invariant_ops": "2.0.0"}).get,
        ask=lambda code: "2.13.0|1|Ascend910B3" if code == ASK_TORCH_NPU else answer,
    )
    finding = by_part(host)["batch_invariant_ops"]
    assert finding.state == state and words in finding.found


def test_cann_and_environment(npu_host: Host) -> None:
    found = by_part(dataclasses.replace(npu_host, environ={"ASCEND_HOME_PATH": "/opt/cann"}))
    assert found["CANN"].state == "broken" and "set_env.sh" in found["CANN"].next_step
    assert found["environment"].state == "absent" and "HCCL_DETERMINISTIC=strict" in found["environment"].next_step
    wrong = by_part(dataclasses.replace(npu_host, environ=dict(npu_host.environ) | {"HCCL_DETERMINISTIC": "true"}))
    assert wrong["environment"].state == "broken" and "HCCL_DETERMINISTIC=true" in wrong["environment"].found


def test_the_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rollout import doctor

    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    report = (Finding("NPU", "ok", "x", "y"), Finding("CANN", "broken", "gone", "torch_npu", "install it"))
    monkeypatch.setattr(doctor, "examine", lambda: report)
    result = CliRunner().invoke(cli.app, ["doctor", "--json", str(tmp_path / "d.json")])
    assert result.exit_code == 1 and "CANN (for torch_npu): install it" in result.output
    assert json.loads((tmp_path / "d.json").read_text())["CANN"]["state"] == "broken"


def test_asking_for_real() -> None:
    """A process of its own answers, or its last words are told."""
    from rollout.doctor import _ask

    assert _ask("print('noise'); print('zerodrift:', 1, 2, sep='|')") == "1|2"
    assert _ask("raise SystemError('gone')") == "failed|SystemError: gone"
