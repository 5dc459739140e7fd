"""Single resolution of the kernel set, what the CPU set declares, and what it refuses (C3)."""

from __future__ import annotations

import pytest
import torch

from rollout.errors import ConfigError, UnsupportedFeature
from rollout.kernels import registry
from rollout.kernels.base import FEATURES, KVLayout
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.kernels.registry import available, columns, kernel_name, platform_default, resolve_kernels


def test_resolution_order() -> None:
    assert resolve_kernels().name == resolve_kernels("auto").name == resolve_kernels("").name == "cpu"
    assert resolve_kernels("cpu", model_default="npu").name == "cpu"
    with pytest.raises(UnsupportedFeature, match="'mps' is not in this build"):
        resolve_kernels("auto", model_default="mps")
    assert available() == ("cpu", "npu")


def test_an_npu_host_gets_the_npu_set_or_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the CPU in silence: a device without its software is said."""
    assert platform_default(lambda: ()) == "cpu" and platform_default(lambda: ("davinci0",)) == "npu"
    monkeypatch.setattr(registry, "platform_default", lambda: "npu")
    assert kernel_name() == "npu" and kernel_name("cpu") == "cpu" and kernel_name(model_default="cpu") == "cpu"
    with pytest.raises(UnsupportedFeature, match="needs torch_npu, which is not installed"):
        resolve_kernels()
    assert resolve_kernels("cpu").name == "cpu"


def test_options_of_another_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention_plan=plain, which kernel set 'cpu' does not have"):
        resolve_kernels("cpu", attention_plan="plain")


def test_columns_of_every_set_without_a_device() -> None:
    """What ``zerodrift kernels`` prints."""
    cpu, *npu = columns()
    assert cpu.here == "ready" and cpu.providers is not None and cpu.support["causal"] == "yes"
    assert len(npu) == 2 and all(set(c.support) == set(FEATURES) for c in (cpu, *npu))
    assert all(c.providers is None and "torch_npu" in c.here for c in npu)


@pytest.mark.parametrize("name", ["cuda", "CPU", "fa3"])
def test_an_unknown_set_is_never_replaced(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"{name}.*available: cpu, npu") as caught:
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


@pytest.mark.parametrize("count", [1, 7, 15])
def test_rows_are_copied_in_every_layer_and_nothing_behind_them(count: int) -> None:
    store = CpuKernelSet(16).allocate_kv(KVLayout(2, 3, 16, 2, 8, torch.bfloat16))
    store.poison()
    rows = torch.arange(2 * 16 * 2 * 8, dtype=torch.bfloat16).view(2, 16, 2, 8)
    for layer in range(2):
        store.write(layer, rows[layer], -rows[layer], torch.arange(16) + 32)
    store.copy_rows(2, 0, count)
    for layer in range(2):
        key, value = store.read(layer, torch.arange(16))
        assert torch.equal(key[:count], rows[layer][:count]) and torch.equal(value[:count], -rows[layer][:count])
        assert bool(key[count:].isnan().all()) and bool(value[count:].isnan().all())
        assert torch.equal(store.read(layer, torch.arange(16) + 32)[0], rows[layer]), "the source is as it was"
    assert bool(store.keys[:, 1].isnan().all())


def test_providers_name_the_block() -> None:
    assert "block=16" in CpuKernelSet(16).providers()["attention"]
    assert CpuKernelSet(16).providers() != CpuKernelSet(32).providers()
