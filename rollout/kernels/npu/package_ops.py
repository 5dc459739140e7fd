"""The Ascend package ``batch_invariant_ops``: found, told from the CUDA package of the same name, proven, and called.

It is closed and built on the host; its operators have no autograd. They are installed below autograd, at the device's
key, where torch's own formulas stay above them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.kernels.npu.fixed_shape import last_reduction
from rollout.kernels.overrides import Kernel

NAME = "batch_invariant_ops"
REQUIRED = (
    "npu_mm_batch_invariant",
    "npu_matmul_batch_invariant",
    "npu_reduce_mean_batch_invariant",
    "npu_reduce_sum_batch_invariant",
    "npu_softmax_batch_invariant",
    "npu_log_softmax_batch_invariant",
)
FUSED_INFER = "npu_fused_infer_attention_score_batch_invariant"
OLDEST = (1, 0)
REPAIR = (
    "install the CANN package cann-ops-batch_invariant for your chip, whose libcust_opapi.so must be on "
    "LD_LIBRARY_PATH, then build and install the wheel of its torch_ops_extension; or set "
    "kernels.invariant_ops=fixed_shape (docs/npu.md)"
)


@dataclass(frozen=True, slots=True)
class PackageOps:
    """The package's operators."""

    version: str
    ops: Any
    """``torch.ops.batch_invariant_ops``, or what stands for it in tests"""

    @property
    def fused_infer(self) -> Callable[..., Any] | None:
        """The batch-invariant fused-infer attention, when the package has it."""
        return getattr(self.ops, FUSED_INFER, None)


def find_package(
    load: Callable[[str], ModuleType] = importlib.import_module,
    version_of: Callable[[str], str] = importlib.metadata.version,
    present: Callable[[str], object | None] = importlib.util.find_spec,
    namespace: Callable[[], Any] = lambda: torch.ops.batch_invariant_ops,
) -> PackageOps | None:
    """The package, whole; None where nothing of that name is installed.

    Raises:
        ConfigError: the CUDA package of the same name, one that does not import, or one that lacks operators.
    """
    if present(NAME) is None:
        return None
    try:
        module = load(NAME)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{NAME} is installed but does not import ({error}); {REPAIR}") from error
    if hasattr(module, "set_batch_invariant_mode"):
        raise ConfigError(
            f"the installed {NAME} is the CUDA package of thinking-machines, not the Ascend one of the same import "
            f"name: uninstall it, then {REPAIR}"
        )
    ops = namespace()
    if missing := [name for name in REQUIRED if not hasattr(ops, name)]:
        raise ConfigError(f"{NAME} is half installed: it lacks {', '.join(missing)}; {REPAIR}")
    try:
        version = version_of(NAME)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
    if numbers and numbers < OLDEST:
        raise ConfigError(f"{NAME} {version} is older than {'.'.join(map(str, OLDEST))}; {REPAIR}")
    return PackageOps(version, ops)


def prove(package: PackageOps, device: torch.device) -> None:
    """Run every operator once on small whole numbers, whose result is exact in any order.

    Raises:
        ConfigError: an operator fails (its CANN part is missing) or computes something else.
    """
    a = (torch.arange(32 * 16).reshape(32, 16) % 7 - 3).to(torch.bfloat16)
    b = (torch.arange(16 * 16).reshape(16, 16) % 5 - 2).to(torch.bfloat16)
    x = torch.arange(64.0).reshape(4, 16)
    product, ops = (a.float() @ b.float()).to(torch.bfloat16), package.ops
    ones = torch.full((4, 16), 2.0)
    cases: tuple[tuple[str, tuple[Any, ...], torch.Tensor, float], ...] = (
        (REQUIRED[0], (a, b), product, 0),
        (REQUIRED[1], (a, b), product, 0),
        (REQUIRED[2], (x, 1, False), x.mean(1), 0),
        (REQUIRED[3], (x, 1, False), x.sum(1), 0),
        (REQUIRED[4], (ones, 1), torch.full((4, 16), 1 / 16), 1e-6),
        (REQUIRED[5], (ones, 1), torch.full((4, 16), 1 / 16).log(), 1e-5),
    )
    for name, arguments, expected, tolerance in cases:
        try:
            moved = [t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments]
            got = getattr(ops, name)(*moved).cpu()
        except RuntimeError as error:
            raise ConfigError(f"{NAME}.{name} does not run ({str(error).splitlines()[0]}); {REPAIR}") from error
        if got.shape != expected.shape or not bool(((got - expected).abs() <= tolerance).all()):
            raise ConfigError(f"{NAME}.{name} {package.version} computes a wrong result; {REPAIR}")


def replacements(package: PackageOps) -> dict[str, Callable[[Any], Kernel]]:
    """aten operator -> builder of its replacement, for the device's dispatch key."""
    ops = package.ops

    def mm(original: Any) -> Kernel:
        return lambda keys, a, b: ops.npu_mm_batch_invariant(a.contiguous(), b)

    def addmm(original: Any) -> Kernel:
        def replaced(
            keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
        ) -> torch.Tensor:
            product: torch.Tensor = ops.npu_mm_batch_invariant(a.contiguous(), b)
            product = product if alpha == 1 else product * alpha
            return product + (bias if beta == 1 else bias * beta)

        return replaced

    def bmm(original: Any) -> Kernel:
        return lambda keys, a, b: ops.npu_matmul_batch_invariant(a, b)

    return {
        "mm": mm,
        "addmm": addmm,
        "bmm": bmm,
        "mean.dim": _reduction(ops.npu_reduce_mean_batch_invariant),
        "sum.dim_IntList": _reduction(ops.npu_reduce_sum_batch_invariant),
        "_softmax": _normalisation(ops.npu_softmax_batch_invariant),
        "_log_softmax": _normalisation(ops.npu_log_softmax_batch_invariant),
    }


def _reduction(operator: Callable[..., torch.Tensor]) -> Callable[[Any], Kernel]:
    return last_reduction(
        lambda original, keys, x, keepdim, dtype: operator(x if dtype is None else x.to(dtype), x.dim() - 1, keepdim)
    )


def _normalisation(operator: Callable[..., torch.Tensor]) -> Callable[[Any], Kernel]:
    def build(original: Any) -> Kernel:
        return lambda keys, x, dim, half_to_float: operator(x.float() if half_to_float else x, dim)

    return build
