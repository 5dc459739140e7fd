"""C5: the manifest says the same where the bits are the same, and differs where they may differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.manifest import build_manifest, manifest_digest
from tests.engines import fresh_model, shared_model


def edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder with another config.json."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    edit(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def difference(a: dict[str, str], b: dict[str, str]) -> set[str]:
    return {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)}


def test_two_loads_say_the_same(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    copy = edited(tiny_qwen3_path, tmp_path / "elsewhere", lambda config: None)
    first = build_manifest(shared_model(tiny_qwen3_path, torch.bfloat16))
    second = build_manifest(fresh_model(copy, torch.bfloat16, trainable=True))
    assert first == second and manifest_digest(first) == manifest_digest(second)
    assert list(first) == sorted(first) and all(isinstance(v, str) for v in first.values())
    assert str(copy) not in json.dumps(second)


def test_what_may_change_a_bit_is_in_it(tiny_qwen3_path: Path, tiny_llama_path: Path, tmp_path: Path) -> None:
    base = build_manifest(shared_model(tiny_qwen3_path, torch.bfloat16))
    fp32 = build_manifest(shared_model(tiny_qwen3_path, torch.float32))
    assert difference(base, fp32) == {"dtype.model", "dtype.lm_head"}
    pages = build_manifest(shared_model(tiny_qwen3_path, torch.bfloat16, 32))
    assert difference(base, pages) == {"kernels.page_size", "kernels.op.attention"}
    llama = build_manifest(shared_model(tiny_llama_path, torch.bfloat16))
    assert difference(base, llama) == {"model.config_digest"}
    digests = {manifest_digest(m) for m in (base, fp32, pages, llama)}
    assert len(digests) == 4

    def other_eps(config: dict[str, Any]) -> None:
        config["rms_norm_eps"] = 1e-5

    changed = build_manifest(fresh_model(edited(tiny_qwen3_path, tmp_path / "eps", other_eps), torch.bfloat16))
    assert difference(base, changed) == {"model.config_digest"}


def test_rope_base_is_in_it(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    """I4: the fault that both sides may share must at least be visible."""

    def other_base(config: dict[str, Any]) -> None:
        config["rope_parameters"]["rope_theta"] *= 2

    base = build_manifest(shared_model(tiny_qwen3_path, torch.bfloat16))
    changed = build_manifest(fresh_model(edited(tiny_qwen3_path, tmp_path / "theta", other_base), torch.bfloat16))
    assert difference(base, changed) == {"model.config_digest"}


@pytest.mark.parametrize("name", ["HCCL_DETERMINISTIC", "ATEN_CPU_CAPABILITY", "MKL_CBWR"])
def test_environment_is_in_it(tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = shared_model(tiny_qwen3_path, torch.bfloat16)
    monkeypatch.delenv(name, raising=False)
    unset = build_manifest(model)
    monkeypatch.setenv(name, "other")
    assert difference(unset, build_manifest(model)) == {f"environment.{name}"}


def test_torch_settings_are_in_it(tiny_qwen3_path: Path) -> None:
    model = shared_model(tiny_qwen3_path, torch.bfloat16)
    base, before = build_manifest(model), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert difference(base, build_manifest(model)) == {"torch.float32_matmul_precision"}
    finally:
        torch.set_float32_matmul_precision(before)
