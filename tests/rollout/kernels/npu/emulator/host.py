"""An emulated NPU host: the kernel set under test on emulated kernels, operators and device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rollout.kernels.npu.kernel_set import NpuKernelSet
from rollout.kernels.npu.package_ops import PackageOps
from rollout.kernels.npu.runtime import NpuRuntime
from tests.rollout.kernels.npu.emulator.device import StockDevice
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage

LATER, TRAIN_INFER = "0.4.2.post1", "0.2.0b1"


def runtime(package: EmulatedPackage, ops: PackageOps | None = None) -> NpuRuntime:
    """What ``load_runtime`` would find on such a host."""
    versions = {"torch_npu": "2.13.0", "cann": "8.5.0", "flash_attn_npu": package.version}
    return NpuRuntime(torch.device("cpu"), "CPU", package.flash(), ops, "emulated Ascend910B", versions, 2)


class EmulatedKernelSet(NpuKernelSet):
    """The set itself; only its mode also installs the emulated device's stock kernels beneath."""

    def __init__(self, package: EmulatedPackage, plan: str = "auto", ops: PackageOps | None = None) -> None:
        super().__init__(runtime(package, ops), 128, plan)
        self.package = package
        self.stock = StockDevice()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The mode of the set above the device's kernels."""
        with self.stock(), self._mode():
            yield

    def invariant_mode(self) -> Any:
        return self.on_device()


def emulated(version: str = LATER, plan: str = "auto", *, faults: frozenset[str] = frozenset()) -> EmulatedKernelSet:
    """A set on a version of the package."""
    return EmulatedKernelSet(EmulatedPackage(version, faults), plan)
