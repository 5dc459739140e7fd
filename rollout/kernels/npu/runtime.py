"""What the NPU set computes with on a host: device, kernels and operators, found and proven once, at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollout.errors import ConfigError, UnsupportedFeature
from rollout.kernels.npu import environment, fixed_shape, package_ops
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.invariant import InvariantMode
from rollout.kernels.npu.lines import parse_version, recognise
from rollout.kernels.npu.package_ops import PackageOps

NPU_KEY = "PrivateUse1"
InvariantOps = Literal["auto", "batch_invariant_ops", "fixed_shape"]


@dataclass(frozen=True, slots=True)
class NpuRuntime:
    """Resolved parts; tests build one on the CPU with emulated parts."""

    device: torch.device
    key: str
    """dispatch key of the device"""
    flash: FlashAttention
    package: PackageOps | None
    """None: the fixed-shape plan"""
    device_name: str
    versions: dict[str, str]
    """component -> version, for the manifest"""
    deterministic_level: int
    """of ``torch_npu.npu.set_deterministic_level``"""

    @property
    def invariant_ops(self) -> str:
        """Who provides products and reductions."""
        return "fixed_shape" if self.package is None else "batch_invariant_ops"

    @property
    def fused_infer(self) -> Callable[..., Any] | None:
        """The batch-invariant fused-infer operator."""
        return None if self.package is None else self.package.fused_infer

    def invariant_mode(self) -> InvariantMode:
        """A mode for this device and these operators."""
        table = fixed_shape.REPLACEMENTS if self.package is None else package_ops.replacements(self.package)
        return InvariantMode(self.key, table)


def choose_package(wanted: str, found: PackageOps | None) -> PackageOps | None:
    """The package to use under a setting, or None for the fixed-shape plan.

    Raises:
        ConfigError: the package is asked for and absent, or the setting is unknown.
    """
    if wanted == "fixed_shape":
        return None
    if wanted == "batch_invariant_ops" and found is None:
        raise ConfigError(
            f"kernels.invariant_ops=batch_invariant_ops, and {package_ops.NAME} is not installed; {package_ops.REPAIR}",
            field="kernels.invariant_ops",
        )
    if wanted not in ("auto", "batch_invariant_ops"):
        raise ConfigError(
            f"invariant_ops {wanted!r} is none of auto, batch_invariant_ops, fixed_shape", field="kernels.invariant_ops"
        )
    return found


def best_level(cann: str) -> int:
    """The strongest deterministic level that a CANN version documents: 3 from 9.2, 2 from 8.5, else 1."""
    numbers = parse_version(cann)
    return 3 if numbers >= (9, 2) else 2 if numbers >= (8, 5) else 1


def import_torch_npu() -> Any:
    """torch_npu, or the reason why not.

    Raises:
        UnsupportedFeature: not installed. ConfigError: installed and broken.
    """
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        raise UnsupportedFeature(
            "kernel set 'npu' needs torch_npu, which is not installed: pip install torch-npu of torch's own version, "
            "after CANN (docs/npu.md); `zerodrift doctor` lists what is missing"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"torch_npu does not import ({error}): source CANN's set_env.sh, and install the torch_npu made for torch "
            f"{torch.__version__}; `zerodrift doctor` says which part is missing"
        ) from error
    return torch_npu


def load_runtime(invariant_ops: str = "auto") -> NpuRuntime:
    """Find and prove everything on this host.

    Raises:
        UnsupportedFeature: no NPU, no torch_npu, no usable flash_attn_npu. ConfigError: a part is broken or set
        wrongly.
    """
    torch_npu = import_torch_npu()
    npu = torch_npu.npu
    if not npu.is_available():
        raise UnsupportedFeature(
            "kernel set 'npu' finds no NPU in this process: check npu-smi, /dev/davinci*, and ASCEND_RT_VISIBLE_DEVICES"
        )
    communicators = torch.distributed.is_available() and torch.distributed.is_initialized()
    environment.apply(os.environ, device_started=bool(npu.is_initialized()), communicators=communicators)
    cann = str(npu.utils.get_cann_version(module="CANN"))
    level = best_level(cann)
    if level >= 2 and hasattr(npu, "set_deterministic_level"):
        npu.set_deterministic_level(level)
    else:
        level = 1
        torch.use_deterministic_algorithms(True)
    npu.config.allow_internal_format = False
    npu.matmul.allow_hf32 = False
    device = torch.device("npu", int(npu.current_device()))
    package = choose_package(invariant_ops, None if invariant_ops == "fixed_shape" else package_ops.find_package())
    if package is not None:
        package_ops.prove(package, device)
    flash = FlashAttention.of(recognise())
    versions = {"torch_npu": str(torch_npu.__version__), "cann": cann, "flash_attn_npu": flash.version}
    if package is not None:
        versions[package_ops.NAME] = package.version
    return NpuRuntime(device, NPU_KEY, flash, package, str(npu.get_device_name()), versions, level)
