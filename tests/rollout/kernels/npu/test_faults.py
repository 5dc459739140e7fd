"""Faults of the real packages, emulated: a sound set passes every check, each fault fails the one meant for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.invariant import InvariantMode
from rollout.kernels.npu.layout import differing_positions
from rollout.kernels.npu.plans import Measured, choose_plan
from rollout.kernels.npu.probe import seen_by_sums
from rollout.kernels.npu.store import NpuKVStore
from rollout.model import load_model
from tests.rollout.kernels.npu.battery import (
    SENSITIVE,
    Probe,
    against_oracle,
    battery,
    company,
    decode_against_training,
    norms,
    products,
)
from tests.rollout.kernels.npu.emulator.host import LATER, TRAIN_INFER, EmulatedKernelSet, emulated

SOUND = [(TRAIN_INFER, "plain"), (LATER, "tile_aligned"), (TRAIN_INFER, "tile_aligned"), (LATER, "row_by_row")]


@pytest.mark.parametrize(("version", "plan"), SOUND)
def test_sound_sets_pass(version: str, plan: str) -> None:
    assert battery(emulated(version, plan)) == dict.fromkeys(
        ("decode against training", "sums", "company", "oracle", "products", "norms"), 0
    )


# ---- the row sum of the later line ------------------------------------------------------------------------------


def test_plain_decode_fails_at_the_predicted_positions_and_nowhere_else() -> None:
    kernels, everywhere, predicted = emulated(LATER, "plain"), list(range(1024)), set(differing_positions(1024))
    failed = set(decode_against_training(seen_by_sums(kernels), everywhere, 1024, heads=8))
    assert failed <= predicted
    for low, high in ((192, 254), (384, 510), (704, 766), (896, 1022)):
        assert any(low <= p <= high for p in failed), f"none in [{low}, {high}]"
    assert len(failed) > len(predicted) // 8


def test_plain_outputs_differ_too() -> None:
    """Rounded outputs show it less often: float16, many heads and two seeds are needed to see both ranges."""
    kernels, predicted = emulated(LATER, "plain"), differing_positions(512)
    failed: list[int] = []
    for seed in (0, 3):
        failed += decode_against_training(kernels, range(150, 512), 512, seed, torch.float16, heads=8, dim=64)
    assert set(failed) <= set(predicted)
    assert any(p < 255 for p in failed) and any(p > 383 for p in failed)


@pytest.mark.parametrize(("version", "plan"), [(LATER, "tile_aligned"), (TRAIN_INFER, "plain")])
def test_exact_at_all_positions(version: str, plan: str) -> None:
    """Steps of 7, edges, and where the plain plan fails, by sums and by outputs."""
    positions = sorted({*range(0, 641, 7), *SENSITIVE, 127, 128, 129, 255, 256, 511, 512, 513, 639, 640})
    kernels = emulated(version, plan)
    assert decode_against_training(seen_by_sums(kernels), positions, 641) == []
    assert decode_against_training(kernels, positions, 641) == []


def test_the_choice_goes_to_the_first_exact_plan() -> None:
    def measure_on(version: str) -> Callable[..., Measured]:
        def measure(plan: Any) -> Measured:
            failed = decode_against_training(seen_by_sums(emulated(version, plan.name)), SENSITIVE, 640)
            return Measured(plan.name, len(failed), len(SENSITIVE), 0.0)

        return measure

    later = choose_plan(measure_on(LATER))
    assert later.plan.name == "tile_aligned" and [m.plan for m in later.measured] == ["plain", "tile_aligned"]
    assert later.measured[0].differing > 0
    assert choose_plan(measure_on(TRAIN_INFER)).plan.name == "plain"


@pytest.mark.parametrize(("version", "first"), [(LATER, "tile_aligned"), (TRAIN_INFER, "plain")])
def test_plans_are_measured_for_a_model(version: str, first: str, tiny_qwen3_path: Path) -> None:
    """What the certificate shows: every plan, how it fared, and the first that is exact."""
    kernels = emulated(version)
    model = load_model(tiny_qwen3_path, dtype=torch.bfloat16, kernels=kernels)
    shown = kernels.measured_plan(model.hf)
    assert shown["first exact plan"] == first == shown["attention_plan"]
    assert ("values differ" in shown["plan plain"]) == (version == LATER)
    assert "exact" in shown["plan tile_aligned"] and "exact" in shown["plan row_by_row"]
    assert "plan fused_infer" not in shown


# ---- faults -----------------------------------------------------------------------------------------------------


def with_kvcache(kernels: EmulatedKernelSet, change: Callable[[dict[str, Any]], dict[str, Any]]) -> EmulatedKernelSet:
    """The set with a call of the KV-cache kernel changed on its way."""
    flash = kernels.runtime.flash

    def kvcache(*args: Any, **given: Any) -> Any:
        return flash.kvcache(*args, **change(given))

    broken: FlashAttention = dataclasses.replace(flash, kvcache=kvcache)
    kernels.calls = dataclasses.replace(kernels.calls, flash=broken)
    return kernels


@pytest.mark.parametrize("plan", ["plain", "tile_aligned"])
def test_splits_by_batch_are_caught(plan: str) -> None:
    """num_splits = 0: keys are cut by the number of tasks, so a row changes with its batch."""
    assert company(with_kvcache(emulated(LATER, plan), lambda given: given | {"num_splits": 0})) > 0
    assert company(with_kvcache(emulated(LATER, plan), lambda given: given)) == 0


def test_metadata_that_ignores_the_scale_is_caught() -> None:
    broken = with_kvcache(emulated("0.3.0"), lambda given: given | {"scheduler_metadata": object()})
    assert against_oracle(broken) > 0 and against_oracle(emulated("0.3.0")) == 0


@pytest.mark.parametrize("version", ["0.3.0", "0.4.2.post1"])
def test_new_keys_left_to_the_kernel_are_caught(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``k=``/``v=`` instead of writing: ignored by one release, reduced in a second phase by another."""
    kernels = emulated(version, "plain")
    wanted = Probe(kernels, 300).decoded([299])

    def lazy_put(self: NpuKVStore, layer: int, key: Any, value: Any, slots: Any) -> None:
        real_put(self, layer, key[:-1], value[:-1], slots[:-1])

    real_put = NpuKVStore.put
    monkeypatch.setattr(NpuKVStore, "put", lazy_put)
    probe = Probe(kernels, 300)
    new = {"k": probe.k[-1:], "v": probe.v[-1:]}
    got = Probe(with_kvcache(kernels, lambda given: given | new), 300).decoded([299])
    assert not torch.equal(got, wanted)


def test_a_mask_forgotten_beyond_512_is_caught() -> None:
    broken = emulated(LATER, faults=frozenset({"unmasked_beyond_512"}))
    assert against_oracle(broken) > 0
    positions = [100, 511, 512, 600, 690]
    # In the padded plan decode and training err alike: only the oracle sees it. Unpadded they also differ.
    plain = emulated(TRAIN_INFER, "plain", faults=frozenset({"unmasked_beyond_512"}))
    assert decode_against_training(plain, positions, 700) == [512, 600, 690]


def test_the_fused_add_rms_norm_is_caught() -> None:
    def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.npu.npu_add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)[0]
        return out

    kernels = emulated()
    assert norms(kernels, fused) > 0 and norms(kernels) == 0


def test_a_batch_dependent_product_is_caught() -> None:
    """The emulated device's stock kernels, as they are: without the fixed-shape plan rows change with their batch."""
    kernels = emulated()
    kernels._mode = InvariantMode("CPU", {})
    assert products(kernels) > 0
    assert products(emulated()) == 0


def test_a_stale_tail_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN that another request left in a page's tail must not reach the padded keys of the next owner."""
    assert not bool(Probe(emulated(), 200).decoded([5, 199]).isnan().any())
    monkeypatch.setattr(NpuKVStore, "clear", lambda self, layer, pages: None)
    assert bool(Probe(emulated(), 200).decoded([5, 199]).isnan().any())
