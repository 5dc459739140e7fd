"""Faults of the real packages, emulated: a sound set passes every check, each fault fails the one meant for it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.certify import attention, forward, linear, logprob, rows
from rollout.certify.battery import certify, run_family
from rollout.certify.certificate import default_path, require_certificate, write_certificate
from rollout.certify.plans import take_certified_plan
from rollout.certify.subject import Family, Level, Subject
from rollout.errors import CertificateError, ParityError, UnsupportedFeature
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.invariant import InvariantMode
from rollout.kernels.npu.layout import differing_positions
from rollout.kernels.npu.plans import ROW_BY_ROW, Measured, choose_plan
from rollout.kernels.npu.probe import seen_by_sums
from rollout.kernels.npu.store import NpuKVStore
from rollout.manifest import build_manifest
from rollout.model import SharedModel, load_model
from tests.rollout.kernels.npu.emulator.host import LATER, TRAIN_INFER, EmulatedKernelSet, emulated
from tests.rollout.kernels.npu.positions import SENSITIVE, Probe, decode_against_training

SOUND = [(TRAIN_INFER, "plain"), (LATER, "tile_aligned")]


@pytest.fixture(scope="module")
def model(tiny_qwen3_path: Path) -> SharedModel:
    """Its kernel set is replaced by each test's own."""
    return load_model(tiny_qwen3_path, dtype=torch.bfloat16, kernels=emulated())


def failures(model: SharedModel, kernels: EmulatedKernelSet, family: Family, level: Level = "quick") -> tuple[str, ...]:
    """What a family of the certificate says of a set; its planted fault must be seen in any case."""
    held = copy.copy(model)
    held.kernels = kernels
    result = run_family(family, Subject(held, None, level, (1,)))
    assert result.control_caught and result.checks > 0
    return result.failures


@pytest.mark.parametrize(("version", "plan"), SOUND)
def test_sound_sets_are_certified(model: SharedModel, version: str, plan: str) -> None:
    held = copy.copy(model)
    held.kernels = emulated(version, plan)
    certificate = certify(held, thread_counts=(1,))
    assert certificate.holds, [f.failures for f in certificate.families]
    assert certificate.plan["attention_plan"] == f"{plan} (set by hand)"


def test_an_open_plan_is_chosen_on_the_device(model: SharedModel) -> None:
    """Plain fails on the later line, tile_aligned holds; manifest and certificate record what was taken."""
    held = copy.copy(model)
    held.kernels = kernels = emulated(LATER)
    kernels.take_plan("plain")
    certificate = certify(held, thread_counts=(1,), families=(attention.FAMILY,))
    assert certificate.holds and kernels.plan.name == "tile_aligned"
    assert certificate.manifest["kernels.op.attention_plan"] == "tile_aligned"
    assert certificate.plan["attention_plan"] == "tile_aligned (chosen by measurement)"
    assert "values differ" in certificate.plan["plan plain"] and "exact" in certificate.plan["plan tile_aligned"]


def scaled(out: Any, factor: float) -> Any:
    """Outputs, or outputs and sums, a little larger."""
    return tuple(x * factor for x in out[:2]) + tuple(out[2:]) if isinstance(out, tuple) else out * factor


def test_a_device_on_which_tiles_do_not_help(model: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every row is decoded; where that differs too and the package is absent, nothing is served."""
    held = copy.copy(model)
    held.kernels = kernels = emulated(LATER)
    real = FlashAttention.packed
    worst: list[bool] = []

    def odd(self: FlashAttention, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return scaled(real(self, q, *args, **options), 1 + 2**-7)

    monkeypatch.setattr(FlashAttention, "packed", odd)
    kernels.choose_plan(model.hf)
    assert kernels.plan is ROW_BY_ROW
    assert kernels.measured_plan(model.hf)["first exact plan"] == "row_by_row"
    decoded = FlashAttention.paged

    def drifting(self: FlashAttention, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        worst.append(True)
        return scaled(decoded(self, q, *args, **options), 1 + 2**-7 * (len(worst) % 3))

    monkeypatch.setattr(FlashAttention, "paged", drifting)
    held.kernels = emulated(LATER)
    with pytest.raises(ParityError, match=r"no way to call attention on this device .*plain: .*row_by_row: "):
        certify(held, thread_counts=(1,))


def test_strict_serving_takes_the_certified_plan(
    model: SharedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the certificate in its usual place, or from a file; without one the set keeps its plan and is refused."""
    monkeypatch.setattr("rollout.certify.certificate.cache_root", lambda: tmp_path)
    held = copy.copy(model)
    held.kernels = chosen = emulated(LATER)
    chosen.take_plan("row_by_row")
    certificate = certify(held, thread_counts=(1,), families=(logprob.FAMILY,))
    assert chosen.plan.name == "tile_aligned", "the choice is the measurement's, not what was taken before"
    by_hand = emulated(LATER, "row_by_row")
    held.kernels = by_hand
    slow = certify(held, thread_counts=(1,), families=(logprob.FAMILY,))
    held.kernels = serving = emulated(LATER)
    serving.take_plan("plain")
    take_certified_plan(held, None)
    assert serving.plan.name == "plain"
    with pytest.raises(CertificateError):
        require_certificate(build_manifest(held), path=None, threads=1)
    write_certificate(slow, tmp_path / "slow.json")
    take_certified_plan(held, tmp_path / "slow.json")
    assert serving.plan.name == "row_by_row"
    write_certificate(slow, default_path(slow.manifest_digest))
    serving.take_plan("plain")
    take_certified_plan(held, None)
    assert serving.plan.name == "row_by_row"
    assert require_certificate(build_manifest(held), path=None, threads=1) == slow
    write_certificate(certificate, default_path(certificate.manifest_digest))
    take_certified_plan(held, None)
    assert serving.plan.name == "tile_aligned", "the first plan that a certificate holds for"
    held.kernels = by_hand
    take_certified_plan(held, None)
    assert by_hand.plan.name == "row_by_row" and by_hand.open_plans() == ()
    with pytest.raises(UnsupportedFeature, match=r"kernels\.attention_plan is row_by_row"):
        by_hand.take_plan("plain")
    with pytest.raises(UnsupportedFeature, match="'fused_infer' cannot run here"):
        serving.take_plan("fused_infer")


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
    assert shown["first exact plan"] == first and shown["attention_plan"].startswith(first)
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
    probe, positions = Probe(emulated(LATER, plan), 1664), [1663, 1662, 1660, 1657, 1400, 200, 127]
    split = with_kvcache(emulated(LATER, plan), lambda given: given | {"num_splits": 0})
    for kernels, sound in ((split, False), (with_kvcache(emulated(LATER, plan), lambda given: given), True)):
        probe = Probe(kernels, 1664)
        assert torch.equal(probe.decoded(positions), probe.decoded(positions, together=False)) == sound


def test_splits_by_batch_fail_the_certificate(model: SharedModel) -> None:
    """In full: keys are only cut where there are more than a thousand."""
    held = copy.copy(model)
    held.kernels = with_kvcache(emulated(LATER), lambda given: given | {"num_splits": 0})
    result = run_family(attention.FAMILY, Subject(held, None, "full", (1,)))
    assert any("alone" in f or "decode" in f for f in result.failures)


def test_metadata_that_ignores_the_scale_is_caught(model: SharedModel) -> None:
    """The certificate asks for a scale other than 1/sqrt(D), which the metadata would bring."""
    broken = with_kvcache(emulated("0.3.0"), lambda given: given | {"scheduler_metadata": object()})
    assert failures(model, broken, attention.FAMILY)
    assert not failures(model, emulated("0.3.0"), attention.FAMILY)


def test_new_keys_that_a_release_ignores_fail_the_certificate(
    model: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set that left a step's last row to ``k=``/``v=`` of 0.3: it would never be in the cache."""
    assert not failures(model, emulated("0.3.0"), forward.FAMILY)
    real_put = NpuKVStore.put
    monkeypatch.setattr(NpuKVStore, "put", lambda self, layer, *rows: real_put(self, layer, *(r[:-1] for r in rows)))
    assert any("decode" in f for f in failures(model, emulated("0.3.0"), forward.FAMILY))


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


def test_a_mask_forgotten_beyond_512_is_caught(model: SharedModel) -> None:
    broken = emulated(LATER, faults=frozenset({"unmasked_beyond_512"}))
    assert any("float64" in f for f in failures(model, broken, attention.FAMILY))
    positions = [100, 511, 512, 600, 690]
    # In the padded plan decode and training err alike: only the oracle sees it. Unpadded they also differ.
    plain = emulated(TRAIN_INFER, "plain", faults=frozenset({"unmasked_beyond_512"}))
    assert decode_against_training(plain, positions, 700) == [512, 600, 690]


def test_the_fused_add_rms_norm_is_caught(tiny_qwen3_path: Path) -> None:
    def fused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out: torch.Tensor = torch.ops.npu.npu_add_rms_norm(x, torch.zeros_like(x), weight, eps)[0]
        return out

    broken = load_model(tiny_qwen3_path, dtype=torch.bfloat16, kernels=emulated())
    for module in broken.hf.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.variance_epsilon
            module.forward = lambda x, m=module, e=eps: fused(x, m.weight, e)
    assert any("RMSNorm" in f for f in failures(broken, emulated(), rows.FAMILY, "full"))


def test_a_batch_dependent_product_is_caught(model: SharedModel) -> None:
    """The emulated device's stock kernels, as they are: without the fixed-shape plan rows change with their batch."""
    kernels = emulated()
    kernels._mode = InvariantMode("CPU", {})
    assert failures(model, kernels, linear.FAMILY)


def test_a_stale_tail_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN that another request left in a page's tail must not reach the padded keys of the next owner."""
    assert not bool(Probe(emulated(), 200).decoded([5, 199]).isnan().any())
    monkeypatch.setattr(NpuKVStore, "clear", lambda self, layer, pages: None)
    assert bool(Probe(emulated(), 200).decoded([5, 199]).isnan().any())
