"""Single resolution of the kernel set, what the CPU set declares, and what it refuses (C3)."""

from __future__ import annotations

import pytest
import torch

from rollout.errors import ConfigError, UnsupportedFeature
from rollout.kernels.base import FEATURES, KVLayout
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.kernels.registry import available, resolve_kernels


def test_resolution_order() -> None:
    assert resolve_kernels().name == resolve_kernels("auto").name == resolve_kernels("").name == "cpu"
    assert resolve_kernels("cpu", model_default="npu").name == "cpu"
    with pytest.raises(UnsupportedFeature, match="'npu' is not in this build"):
        resolve_kernels("auto", model_default="npu")
    assert available() == ("cpu",)


@pytest.mark.parametrize("name", ["cuda", "CPU", "fa3"])
def test_an_unknown_set_is_never_replaced(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"{name}.*available: cpu") as caught:
        resolve_kernels(name)
    assert caught.value.field == "kernels.name"


def test_one_set_a_page_size() -> None:
    assert resolve_kernels(page_size=16) is resolve_kernels("cpu", page_size=16)
    assert resolve_kernels(page_size=16).page_size == 16
    assert resolve_kernels().page_size == 128


@pytest.mark.parametrize("size", [0, 1, 8, 17, 129, 512])
def test_page_sizes_off_the_list_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        resolve_kernels(page_size=size)


def test_features() -> None:
    kernels = CpuKernelSet()
    assert kernels.capabilities.features <= FEATURES.keys()
    for feature in FEATURES:
        if feature in kernels.capabilities.features:
            kernels.require(feature, "a test")
        else:
            with pytest.raises(UnsupportedFeature, match=f"a test needs {feature}"):
                kernels.require(feature, "a test")
    assert {"sliding_window", "softcap", "mla", "moe", "fp8"}.isdisjoint(kernels.capabilities.features)


def test_kv_store() -> None:
    kernels = CpuKernelSet(16)
    layout = KVLayout(2, 3, 16, 2, 8, torch.bfloat16)
    store = kernels.allocate_kv(layout)
    assert layout.bytes_per_page == 2 * 2 * 16 * 2 * 8 * 2
    assert store.keys.nbytes + store.values.nbytes == layout.bytes_per_page * layout.num_pages
    key, value = torch.ones(1, 2, 8, dtype=torch.bfloat16), torch.full((1, 2, 8), 2.0, dtype=torch.bfloat16)
    store.poison()
    store.write(1, key, value, torch.tensor([2 * 16 + 5]))
    assert int(store.keys.isfinite().sum()) == int(store.values.isfinite().sum()) == 2 * 8
    assert torch.equal(store.keys[1, 2, :, :, 5], key[0]) and torch.equal(store.values[1, 2, :, 5], value[0])
    with pytest.raises(UnsupportedFeature, match="float16"):
        kernels.allocate_kv(KVLayout(1, 1, 16, 1, 8, torch.float16))
    with pytest.raises(ConfigError, match="pages of 32"):
        kernels.allocate_kv(KVLayout(1, 1, 32, 1, 8, torch.float32))


def test_providers_name_the_block() -> None:
    assert "block=16" in CpuKernelSet(16).providers()["attention"]
    assert CpuKernelSet(16).providers() != CpuKernelSet(32).providers()
