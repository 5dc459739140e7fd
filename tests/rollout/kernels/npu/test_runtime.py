"""Finding everything on a host, with a torch_npu that is not there."""

from __future__ import annotations

import builtins
import os
import sys
import types
from typing import Any

import pytest
import torch

from rollout.errors import ConfigError, RolloutError, UnsupportedFeature
from rollout.kernels.npu import environment, runtime
from rollout.kernels.npu.host import device_nodes
from rollout.kernels.npu.kernel_set import NpuKernelSet
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage
from tests.rollout.kernels.npu.emulator.package import emulated_ops


class FakeNpu:
    """What of ``torch_npu.npu`` the runtime uses."""

    def __init__(self, *, available: bool = True, started: bool = False, cann: str = "8.5.0") -> None:
        self.available, self.started, self.cann = available, started, cann
        self.levels: list[int] = []
        self.config, self.matmul = types.SimpleNamespace(), types.SimpleNamespace()
        self.utils = types.SimpleNamespace(get_cann_version=lambda module: cann)

    def is_available(self) -> bool:
        return self.available

    def is_initialized(self) -> bool:
        return self.started

    def current_device(self) -> int:
        return 0

    def get_device_name(self) -> str:
        return "Ascend910B3"

    def set_deterministic_level(self, level: int) -> None:
        self.levels.append(level)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a fake torch_npu and an emulated flash_attn_npu; undoes what a load leaves in the process."""
    before = torch.are_deterministic_algorithms_enabled()

    def install(npu: FakeNpu, version: str = "0.4.2.post1", package: Any = None) -> FakeNpu:
        module = types.SimpleNamespace(npu=npu, __version__="2.13.0")
        monkeypatch.setattr(runtime, "import_torch_npu", lambda: module)
        monkeypatch.setattr(runtime, "recognise", lambda: EmulatedPackage(version).installed())
        monkeypatch.setattr(runtime.package_ops, "find_package", lambda: package)
        real = torch.device
        monkeypatch.setattr(runtime.torch, "device", lambda *a: real("cpu"))
        for name in environment.required():
            monkeypatch.delenv(name, raising=False)
        return npu

    yield install
    for name in environment.required():
        os.environ.pop(name, None)
    torch.use_deterministic_algorithms(before)


def test_a_whole_host(host: Any) -> None:
    npu = host(FakeNpu())
    found = runtime.load_runtime()
    assert found.versions == {"torch_npu": "2.13.0", "cann": "8.5.0", "flash_attn_npu": "0.4.2.post1"}
    assert found.key == "PrivateUse1" and found.invariant_ops == "fixed_shape" and found.device_name == "Ascend910B3"
    assert npu.levels == [2] and found.deterministic_level == 2
    assert npu.config.allow_internal_format is False and npu.matmul.allow_hf32 is False
    assert environment.wrong(os.environ) == []
    kernels = NpuKernelSet(found)
    assert kernels.plan.name == "tile_aligned"
    providers = kernels.providers()
    assert providers["attention_plan"] == "tile_aligned" and providers["version.cann"] == "8.5.0"
    assert "flash_attn_npu_3:flash_attn_with_kvcache" in providers["attention"] and "128 rows" in providers["linear"]


def test_with_the_ascend_package(host: Any) -> None:
    host(FakeNpu(cann="9.2.0"), "0.2.0b1", runtime.PackageOps("2.0.0", emulated_ops()))
    found = runtime.load_runtime()
    assert found.invariant_ops == "batch_invariant_ops" and found.deterministic_level == 3
    kernels = NpuKernelSet(found)
    assert kernels.plan.name == "plain" and kernels.providers()["linear"] == "batch_invariant_ops"
    assert kernels.providers()["version.batch_invariant_ops"] == "2.0.0"


def test_an_older_cann_gets_torchs_own_switch(host: Any) -> None:
    npu = host(FakeNpu(cann="8.0.RC3"))
    assert runtime.load_runtime().deterministic_level == 1 and npu.levels == []
    assert torch.are_deterministic_algorithms_enabled()


def test_no_device(host: Any) -> None:
    host(FakeNpu(available=False))
    with pytest.raises(UnsupportedFeature, match=r"finds no NPU.*ASCEND_RT_VISIBLE_DEVICES"):
        runtime.load_runtime()


def test_a_device_that_started_before_the_environment(host: Any) -> None:
    host(FakeNpu(started=True))
    with pytest.raises(ConfigError, match="must be set before the device starts"):
        runtime.load_runtime()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ModuleNotFoundError("No module named 'torch_npu'"), UnsupportedFeature, "not installed.*zerodrift doctor"),
        (ImportError("libhccl.so: cannot open"), ConfigError, "does not import .libhccl.so.*set_env.sh"),
        (RuntimeError("ERR00007 another accelerator"), ConfigError, "does not import .ERR00007"),
    ],
    ids=["absent", "no CANN", "another accelerator"],
)
def test_torch_npu_that_does_not_import(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[RolloutError], words: str
) -> None:
    real = builtins.__import__

    def importing(name: str, *args: Any, **options: Any) -> Any:
        if name == "torch_npu":
            raise error
        return real(name, *args, **options)

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(kind, match=words):
        runtime.import_torch_npu()


@pytest.mark.parametrize(("cann", "level"), [("8.0.RC3", 1), ("8.5.0", 2), ("9.1.0", 2), ("9.2.0", 3), ("", 1)])
def test_deterministic_levels(cann: str, level: int) -> None:
    assert runtime.best_level(cann) == level


def test_device_nodes(tmp_path: Any) -> None:
    for name in ("davinci10", "davinci2", "davinci_manager", "null"):
        (tmp_path / name).touch()
    assert device_nodes(tmp_path) == ("davinci2", "davinci10")
    assert device_nodes(tmp_path / "none") == ()
